// The address says what the page shows: one of its pages or, of a run, one of its views. So Back,
// Forward, a reload and a second tab find the same place. (Gradio keeps `page` for itself.)

const PAGES = ["new", "runs", "chat", "hardware"];
const VIEWS = ["overview", "learning", "machine", "chat", "evaluate", "settings", "log", "export"];
const CHARTED = ["overview", "learning", "machine"]; // views of a run that have charts
// Addresses of earlier versions name a tab.
const TABS = new Map([
    ["train", "new"],
    ["live", "run"],
    ["runs", "runs"],
    ["talk", "chat"],
    ["hardware", "hardware"],
]);

// Returns what the address names. `run` is null if it leaves the run open.
export function readPlace() {
    const query = new URLSearchParams(location.search);
    const page = pageOf(query);
    if (page !== "run") return { page, view: "overview", run: null, step: null };
    const named = query.get("tab") === "talk" ? "chat" : query.get("view");
    const view = VIEWS.includes(named) ? named : "overview";
    const run = query.get("run") || null;
    const hasStep = run !== null && /^\d{1,15}$/.test(query.get("step"));
    return { page, view, run, step: hasStep ? Number(query.get("step")) : null };
}

function pageOf(query) {
    if (PAGES.includes(query.get("show"))) return query.get("show");
    if (query.get("show") === "talk") return "chat"; // its address before
    const tab = query.get("tab");
    if (tab === "talk" && query.get("run")) return "run";
    if (TABS.has(tab)) return TABS.get(tab);
    if (query.get("run") || VIEWS.includes(query.get("view"))) return "run";
    return query.has("compare") ? "runs" : "new";
}

// Whether a place shows charts as soon as it is opened.
export const hasCharts = ({ page, view }) => page === "run" && CHARTED.includes(view);

export function addressOf({ page, view, run, step }) {
    const query = new URLSearchParams();
    if (page !== "run") query.set("show", page);
    else {
        if (run) query.set("run", run);
        query.set("view", view);
        if (run && step !== null) query.set("step", step);
    }
    return `${location.pathname}?${query}`;
}

// Calls `go(link, event)` for clicks on links in `root` that match `selector`. A click that opens a
// link elsewhere, as with Ctrl, stays the browser's.
export function followLinks(root, selector, go) {
    root.addEventListener("click", (event) => {
        const link = event.target.closest(selector);
        const isElsewhere = event.ctrlKey || event.metaKey || event.shiftKey || event.altKey;
        if (!link || isElsewhere || event.button !== 0) return;
        event.preventDefault();
        go(link, event);
    });
}

// Marks the links of the current place; `isCurrent(link)` is true for these.
export function markCurrent(links, isCurrent) {
    for (const link of links) {
        if (isCurrent(link)) link.setAttribute("aria-current", "page");
        else link.removeAttribute("aria-current");
    }
}
