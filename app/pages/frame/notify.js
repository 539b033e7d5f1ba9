// Shows a browser notification when a run that this page watches ends, or waits for disk space,
// while the page is hidden.

const KEPT = "ramstream-notify";
const DENIED =
    "The browser blocks notifications of this page. Allow them in its settings for this address.";

let before = null; // the run and its tone in the previous run bar

// The choice on this page. A browser that stores nothing for a page asks again each time.
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
        // `chosen` keeps the choice while the page is open.
    }
}

// Is called with every run bar that arrives.
export function announce(bar) {
    const rests = before?.run_id === bar.run_id && before.tone === "busy" && bar.tone !== "busy";
    before = { run_id: bar.run_id, tone: bar.tone };
    const isNotable = rests && (bar.state !== "paused" || bar.waits);
    const isAllowed = window.Notification?.permission === "granted";
    if (!isNotable || !wanted() || !document.hidden || !isAllowed) return;
    const shown = new Notification(`${bar.name}: ${bar.word.toLowerCase()}`, {
        body: bar.sentence,
        tag: bar.run_id,
    });
    shown.addEventListener("click", () => {
        window.focus();
        shown.close();
    });
}

// The switch for notifications. Switching it on asks for the browser's permission. It is hidden if
// the browser has no notifications.
export class NotifySwitch {
    // notify(sentence) shows a sentence to the person.
    constructor(button, notify) {
        this.button = button;
        this.notify = notify;
        if (!("Notification" in window)) return;
        button.hidden = false;
        button.title =
            "A browser notification when the run ends or the disk is full, while this page is " +
            "in the background";
        button.addEventListener("click", () => this.toggle());
        this.show();
    }

    async toggle() {
        const on = !wanted() && (await Notification.requestPermission()) === "granted";
        choose(on ? "on" : "off");
        this.show();
        if (Notification.permission === "denied") this.notify(DENIED);
    }

    show() {
        const on = wanted() && Notification.permission === "granted";
        this.button.setAttribute("aria-pressed", String(on));
        this.button.textContent = on ? "Will notify" : "Notify me";
    }
}
