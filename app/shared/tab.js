// The name of this tab, under which the server keeps its draft. A reload keeps it.

const NAME = "ramstream-tab";
const IS_OPEN = "ramstream-tab-is-open";

// A browser may keep nothing for a page; its tab then has another name after a reload.
function kept(act) {
    try {
        return act(sessionStorage);
    } catch {
        return null;
    }
}

// What a browser keeps for a tab is copied into one that is opened from it, or duplicates it. The
// first one is still open then, so the copy takes a name of its own.
function named() {
    const known = kept((storage) => storage.getItem(NAME));
    const isCopy = kept((storage) => storage.getItem(IS_OPEN)) !== null;
    const given = crypto.getRandomValues(new Uint32Array(3));
    const own = [...given].map((part) => part.toString(36)).join("-");
    return known && !isCopy ? { name: known, from: "" } : { name: own, from: known ?? "" };
}

const { name, from } = named();
const open = () =>
    kept((storage) => {
        storage.setItem(NAME, name);
        storage.setItem(IS_OPEN, "");
    });

open();
window.addEventListener("pageshow", open); // also of a page that the browser had put aside
window.addEventListener("pagehide", () => kept((storage) => storage.removeItem(IS_OPEN)));
// For Gradio, which fills the form: the tab, and the one whose draft it begins with.
window.ramstreamTab = `${name} ${from}`;

export const tabName = () => name;
