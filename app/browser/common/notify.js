// Notifies by way of the browser when a run that this page watches ends, or waits for room on the
// disk, while nobody looks at the page.

const KEPT = "ramstream-notify";

let before = null; // the run of the last run bar, and its tone

// What was chosen on this page. A browser that keeps nothing for a page asks anew each time.
let chosen = null;

function wanted() {
    try {
        return (chosen ?? localStorage.getItem(KEPT)) === "on";
    } catch {
        return false;
    }
}

function choose(how) {
    chosen = how;
    try {
        localStorage.setItem(KEPT, how);
    } catch {
        // `chosen` holds for as long as the page is open.
    }
}

// Is called with every run bar that arrives.
export function announce(bar) {
    const rests = before?.run_id === bar.run_id && before.tone === "busy" && bar.tone !== "busy";
    before = { run_id: bar.run_id, tone: bar.tone };
    const isWorthTelling = rests && (bar.state !== "paused" || bar.waits);
    const isAllowed = window.Notification?.permission === "granted";
    if (!isWorthTelling || !wanted() || !document.hidden || !isAllowed) return;
    const shown = new Notification(`${bar.name}: ${bar.word.toLowerCase()}`, {
        body: bar.sentence,
        tag: bar.run_id,
    });
    shown.addEventListener("click", () => {
        window.focus();
        shown.close();
    });
}

// The switch asks for the browser's permission when it is switched on. It is hidden where the
// browser has no notifications.
export class NotifySwitch {
    constructor(button) {
        this.button = button;
        if (!("Notification" in window)) return;
        button.hidden = false;
        button.title =
            "A notification of the browser when the run ends or waits for room on the disk, " +
            "while this page is in the background";
        button.addEventListener("click", () => this.toggle());
        this.show();
    }

    async toggle() {
        const on = !wanted() && (await Notification.requestPermission()) === "granted";
        choose(on ? "on" : "off");
        this.show();
        if (Notification.permission === "denied")
            this.button.title = "The browser does not allow notifications of this page.";
    }

    show() {
        const on = wanted() && Notification.permission === "granted";
        this.button.setAttribute("aria-pressed", String(on));
        this.button.textContent = on ? "Will notify" : "Notify me";
    }
}
