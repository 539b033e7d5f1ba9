// Shows the verdict over a run: its main finding, the others, and the evidence of each. It
// offers a change of the run's settings, which can be opened in the Train form.

import { el, send, setText } from "../../shared/dom.js";

export class Diagnosis {
    // part(name) finds a node of the Live tab.
    constructor(part) {
        this.part = part;
        this.run = null;
        this.offer = null;
        this.findings = "[]";
        this.evidence = el("p");
        this.why = el("details", { class: "rs-hint" }, el("summary", {}, "Why"), this.evidence);
        part("diagnosis-advice").after(this.why);
        part("offer-button").addEventListener("click", () => this.open());
    }

    show(verdict, run) {
        const { part } = this;
        const { text, tone, advice, evidence, offer, also } = verdict;
        if (run !== this.run) part("offer-error").hidden = true;
        this.run = run;
        this.offer = offer;
        part("diagnosis").hidden = false;
        part("diagnosis").dataset.tone = tone;
        setText(part("diagnosis-text"), text);
        setText(part("diagnosis-advice"), advice);
        setText(this.evidence, evidence);
        this.why.hidden = !evidence;
        this.showFindings(also);
        part("offer").hidden = !offer;
        setText(part("offer-label"), offer?.label ?? "");
    }

    // Findings that are already there are not replaced, so that a selection in them, and evidence
    // that was opened, stay.
    showFindings(also) {
        const list = this.part("diagnosis-also");
        list.hidden = !also.length;
        const findings = JSON.stringify(also);
        if (findings === this.findings) return;
        this.findings = findings;
        list.replaceChildren(...also.map(findingItem));
    }

    // Reloads the page as a new tab would load it: the server fills its form with the stored draft.
    async open() {
        const button = this.part("offer-button");
        const error = this.part("offer-error");
        button.disabled = true;
        error.hidden = true;
        try {
            await send(`/api/runs/${encodeURIComponent(this.run)}/draft`, {
                changes: this.offer.changes,
            });
            location.assign(`${location.pathname}?tab=train`);
        } catch (failure) {
            setText(error, failure.message);
            error.hidden = false;
        } finally {
            button.disabled = false;
        }
    }
}

function findingItem({ text, tone, advice, evidence }) {
    const caption = `${text} ${advice}`.trimEnd();
    if (!evidence) return el("li", { "data-tone": tone }, caption);
    const summary = el("summary", { "aria-label": `Why: ${text}` }, "Why");
    return el("li", { "data-tone": tone }, caption, el("details", {}, summary, evidence));
}
