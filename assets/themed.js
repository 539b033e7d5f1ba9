// Figures in the colours of the theme.

export function themed(value) {
  // Colours that are named as variables of the style sheet become what they are in this theme.
  if (typeof value === 'string') {
    return value.startsWith('--rs-') ? getComputedStyle(document.body).getPropertyValue(value).trim() : value;
  }
  if (Array.isArray(value)) return value.map(themed);
  return value && typeof value === 'object'
    ? Object.fromEntries(Object.entries(value).map(([name, item]) => [name, themed(item)])) : value;
}

// The layout of a small figure in `node`, as wide as that is.
export function small(node, layout) {
  const style = getComputedStyle(document.body), colour = (name) => style.getPropertyValue(`--rs-${name}`).trim();
  const axes = Object.entries(layout).filter(([name]) => /^[xy]axis/.test(name)).map(([name, axis]) => [name, {
    gridcolor: colour('line'), linecolor: colour('line'), ...axis, tickfont: {color: colour('muted'), size: 11},
    title: {...axis.title, font: {color: colour('muted'), size: 11}}}]);
  return {...layout, ...Object.fromEntries(axes), width: node.clientWidth, height: node.clientHeight,
    paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', font: {family: getComputedStyle(node).fontFamily},
    hoverlabel: {bgcolor: colour('card'), bordercolor: colour('field-line'), font: {color: colour('text'), size: 12}}};
}
