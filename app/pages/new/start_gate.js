// Start and Add to queue wait for the verdict: a click on one, while settings are being checked,
// takes effect when these fit.

const BUTTONS = "#start, #add-to-queue";
const LOOK = 20; // ms between two looks whether Gradio has drawn the button anew
const LOOKS = 50;

export class StartGate {
    // asking: returns whether the verdict that stands is one of other settings.
    constructor(asking) {
        this.asking = asking;
        this.held = null;
        document.addEventListener("click", (event) => this.hold(event), { capture: true });
    }

    hold(event) {
        const button = event.target.closest?.(BUTTONS);
        if (!button || !this.asking()) return;
        event.stopImmediatePropagation();
        event.preventDefault();
        this.held = button;
        button.setAttribute("aria-busy", "true");
    }

    // A verdict stands: what it does not allow is forgotten.
    async release({ can_start: canStart, can_queue: canQueue }) {
        const { held } = this;
        if (!held) return;
        this.held = null;
        const isAllowed = held.id === "start" ? canStart : canQueue;
        for (let left = LOOKS; isAllowed && left > 0 && held.disabled; left -= 1)
            await new Promise((resolve) => setTimeout(resolve, LOOK));
        held.removeAttribute("aria-busy");
        if (isAllowed && !this.asking()) held.click();
    }
}
