// What the preview found about the data joins the fit panel: memory that suffices is no
// reason to start a run whose data cannot be trained on.

const ONE = "1 thing to confirm";
const HEADLINES = {
    true: "Data cannot be trained on",
    false: "Nothing to train on in the first rows",
};

// Whether a preview was made from the values that the form shows.
export function isOf({ shown }, { given = {} }) {
    return Object.entries(given).every(
        ([name, value]) => String(shown[name] ?? "") === String(value ?? ""),
    );
}

// What stands against training on the form's data, as `text`, whether it `blocks` a start, and a
// `headline` of its own where it has one; null if nothing does, or if the preview is of other data.
export function findingOn(form, preview) {
    return preview && form && isOf(form, preview) ? (preview.finding ?? null) : null;
}

export const differ = (one, other) => JSON.stringify(one) !== JSON.stringify(other);

// Counts the question and the warnings that are listed with it and have a change to take. What has
// none is information.
function toConfirm(question, { reasons, fixes }) {
    const isAsked = (reason) => Object.keys(fixes[reason]?.changes ?? {}).length > 0;
    const count = 1 + reasons.filter((reason) => reason !== question && isAsked(reason)).length;
    return count === 1 ? ONE : `${count} things to confirm`;
}

// The fit panel with a finding on the data, which may be null. A panel that is bad already, or of a
// run that lacks its model, keeps its headline and tone.
export function withFinding(fit, finding) {
    if (!finding) return fit;
    const { text, blocks, asks } = finding;
    const headline = asks ? toConfirm(text, fit) : (finding.headline ?? HEADLINES[blocks]);
    const mayBegin = fit.can_start || fit.can_queue;
    // What is to be confirmed about the machine is counted together with a question on the data.
    const isAsked = blocks && fit.headline === ONE;
    const isKept = fit.tone === "bad" || !(mayBegin || isAsked);
    const tone = blocks && !asks ? "bad" : "warn";
    const judged = {
        ...fit,
        headline: isKept ? fit.headline : headline,
        tone: isKept ? fit.tone : tone,
        reasons: [...new Set([text, ...fit.reasons])],
    };
    if (!blocks) return judged;
    const why_not = mayBegin ? text : fit.why_not;
    return { ...judged, can_start: false, can_queue: false, why_not };
}
