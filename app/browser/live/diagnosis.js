// Shows how a run is doing, and offers a change of its settings, which can be opened in the Train
// form.

import { el, send, setText } from "../common/dom.js";

export class Diagnosis {
    // part(name) finds a node of the Live tab.
    constructor(part) {
        this.part = part;
        this.run = null;
        this.offer = null;
        part("offer-button").addEventListener("click", () => this.open());
    }

    show(diagnosis, run) {
        const { part } = this;
        const { text, tone, advice, offer, also } = diagnosis;
        if (run !== this.run) part("offer-error").hidden = true;
        this.run = run;
        this.offer = offer;
        part("diagnosis").hidden = false;
        part("diagnosis").dataset.tone = tone;
        setText(part("diagnosis-text"), text);
        setText(part("diagnosis-advice"), advice);
        this.showRemarks(also);
        part("offer").hidden = !offer;
        setText(part("offer-label"), offer?.label ?? "");
    }

    // Remarks that are already there are not replaced, so that a person's selection is kept.
    showRemarks(remarks) {
        const list = this.part("diagnosis-also");
        list.hidden = !remarks.length;
        const shown = [...list.children].map((item) => item.textContent);
        if (JSON.stringify(shown) === JSON.stringify(remarks)) return;
        list.replaceChildren(...remarks.map((remark) => el("li", {}, remark)));
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
