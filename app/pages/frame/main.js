// The main script of the page: it mounts the places that Gradio creates, and starts the poll loop.
//
// Everything shown arrives as JSON and is set with textContent; nothing is ever parsed as markup.

import { keepFocus } from "./kept_focus.js";
import { mount } from "./mounts.js";
import { connection } from "./poller.js";
import { draw } from "./router.js";
import { wake } from "./schedule.js";
import { page } from "./state.js";

if (page.place.run) Object.assign(page, { run: page.place.run, chosen: true });

draw();
keepFocus();

// Gradio may have created places before this script ran; from here on it passes them directly.
const waiting = window.ramstreamPlaces ?? [];

window.ramstreamPlaces = { push: mount };

for (const place of waiting) mount(place);

document.addEventListener("visibilitychange", () => {
    if (!document.hidden) wake();
});

for (const event of ["online", "pageshow"]) window.addEventListener(event, wake);

window.addEventListener("offline", () => connection.lose());

document.addEventListener("resume", () => {
    connection.wakeUp();
    wake();
});
