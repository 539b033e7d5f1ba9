// What the preview found about the data joins the verdict next to Start: memory that suffices is no
// reason to start a run whose data cannot be trained on.

const HEADLINES = {
    true: "These data cannot be trained on.",
    false: "The first rows have nothing to train on.",
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

// The server's verdict with a finding on the data, which may be null. A verdict that is bad already
// keeps its headline.
export function withFinding(verdict, finding) {
    if (!finding) return verdict;
    const { text, blocks, headline = HEADLINES[blocks] } = finding;
    const isBad = verdict.tone === "bad";
    const judged = {
        ...verdict,
        headline: isBad ? verdict.headline : headline,
        tone: blocks || isBad ? "bad" : "warn",
        reasons: [...new Set([text, ...verdict.reasons])],
    };
    if (!blocks) return judged;
    const mayBegin = verdict.can_start || verdict.can_queue;
    const why_not = mayBegin ? text : verdict.why_not;
    return { ...judged, can_start: false, can_queue: false, why_not };
}
