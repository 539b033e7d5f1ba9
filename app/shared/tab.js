// The name of this tab, under which the server keeps its draft. `asked_first.js` has given it.

export const tabName = () => window.ramstreamTab;
