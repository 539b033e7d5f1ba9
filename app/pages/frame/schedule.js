// When the server is polled next.

import { page } from "./state.js";

let work = () => {};

// Says what is due each time.
export function everyTime(does) {
    work = does;
}

export function wake() {
    plan(0);
}

export function plan(wait) {
    clearTimeout(page.timer);
    page.due = Date.now() + wait;
    page.timer = setTimeout(work, wait);
}
