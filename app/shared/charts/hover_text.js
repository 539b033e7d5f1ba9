// The texts that the server writes for Plotly's hover labels, where the page shows them by itself.

// In them, <, > and & of names were escaped as entities.
export const withoutEntities = (line) =>
    line.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");
