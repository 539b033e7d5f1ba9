// Which place is shown. The address says it, so that Back, Forward, a reload and a second tab find
// the same.

import { addressOf, hasCharts, readPlace } from "../../shared/address.js";
import { preparePlotly } from "../../shared/charts/load_plotly.js";
import { trainShown } from "../new/train.js";
import { wake } from "./schedule.js";
import { page, places } from "./state.js";

// Shows a place. What `change` leaves out stays, except that another run is shown without a step.
export function go(change) {
    const before = page.place;
    const isOther = "run" in change && change.run !== before.run;
    const place = { ...before, ...(isOther ? { step: null } : {}), ...change };
    if (place.page !== "run") Object.assign(place, { view: "overview", run: null, step: null });
    else if (!("run" in change) && before.page !== "run") place.run = page.run;
    const address = addressOf(place);
    if (address !== location.pathname + location.search) history.pushState(null, "", address);
    show(place);
    if (place.page !== "runs") return;
    places.runs?.comparison.close(); // a link to the list shows the list
    window.scrollTo(0, 0);
}

// Follows Back and Forward.
window.addEventListener("popstate", () => {
    show(readPlace());
    places.runs?.comparison.followAddress();
});

function show(place) {
    const before = page.place;
    const isMoved = place.page !== before.page || place.view !== before.view;
    page.chosen = place.page === "run" && place.run !== null;
    page.place = null; // forgetting a run changes no address
    if (page.chosen && place.run !== page.run) takeRun(place.run);
    page.place = place;
    if (hasCharts(place)) preparePlotly();
    places.run?.setStep(place.step);
    draw();
    if (isMoved) {
        window.scrollTo(0, 0);
        if (place.page === "new") trainShown(true);
    }
    wake();
}

// Shows the page of the current place. All pages exist; the style sheet hides all others.
export function draw() {
    const { place } = page;
    document.body.dataset.page = place.page;
    document.body.dataset.view = place.page === "run" ? place.view : "";
    places.sidebar?.mark({ ...place, run: page.run });
    places.bar?.mark({ ...place, run: page.run });
    places.run?.setView(place.view);
    places.chat?.setRun(runOfChat());
}

// Forgets what was shown of the run before.
export function takeRun(id) {
    Object.assign(page, { run: id, seq: 0, seen: 0 });
    places.run?.clear();
}

export function openRun(id, view = "overview") {
    go({ page: "run", run: id, view });
}

// The run that is shown stays, whichever begins next: a person acts on it.
export function stayWithRun() {
    page.chosen = page.run !== null;
    if (page.place.page !== "run" || page.place.run === page.run) return;
    page.place = { ...page.place, run: page.run };
    history.replaceState(null, "", addressOf(page.place));
}

// The run was deleted here.
export function closeRun(id) {
    places.sidebar?.changed();
    if (page.run !== id) return;
    page.chosen = false;
    takeRun(null);
    places.bar?.clear();
    wake();
}

// Passes the meant run to Chat at the next poll.
export function openChat(id) {
    page.openChat = id;
    openRun(id, "chat");
}

export function setAxis(axis) {
    page.axis = axis;
    page.seen = 0;
    wake();
}

// The step whose timeline is shown, null for the latest one. It replaces the address, since Back
// should not go through the steps one by one. An address with a step names the run too.
export function setStep(step) {
    if (page.place?.page !== "run" || page.place.step === step) return;
    const run = step === null ? page.place.run : page.run;
    page.place = { ...page.place, run, step };
    page.chosen = run !== null;
    history.replaceState(null, "", addressOf(page.place));
}

// The page Chat is of no run; the view Chat is of the run that is shown.
export function runOfChat() {
    return page.place.page === "run" ? page.run : null;
}
