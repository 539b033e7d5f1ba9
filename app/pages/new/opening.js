// What the server has said of the form with which the page begins, before Gradio has made the form.

import { isOf } from "./finding.js";

let opening = window.ramstreamOpening;

// Resolves to the answer to a check of this form, and to null if the page began with another one,
// if the server had no answer at once, and from the second time on.
export async function earlyAnswer({ preset, shown }) {
    const found = await opening;
    opening = null;
    if (!found?.check || found.preset !== preset) return null;
    return isOf({ shown }, { given: found.shown }) ? found.check : null;
}
