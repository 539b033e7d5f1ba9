// What the page knows: what it shows, of which run, and which places of it exist.

import { readPlace } from "../../shared/address.js";

export const page = {
    place: readPlace(), // what the address says
    run: null,
    chosen: false, // whether the address or a person named the run
    server: null,
    seq: 0, // the number of the last answer about the run
    seen: 0, // the number of the last answer that was drawn
    axis: "step",
    active: undefined, // the active run, null for none, undefined before the first answer
    openChat: null,
    bar: null,
    failures: 0, // in a row
    turn: 0, // counts polls of the server; only the newest one counts
    timer: 0,
    due: Infinity, // when the next poll was due
    delay: 500, // ms until the next poll
    reading: new AbortController(),
};

export const places = {
    sidebar: null,
    bar: null,
    run: null,
    runs: null,
    chat: null,
    hardware: null,
};
