// Keeps the focus in a list of Gradio's form when something was chosen in it. Gradio takes it away,
// and whoever uses the keyboard would start at the top of the page again.

const BOX = '.rs-train input[role="combobox"]';

let chose = false;

// The choice that is made now, if any, ends with the turn.
function notice(isChoice) {
    if (!isChoice) return;
    chose = true;
    setTimeout(() => {
        chose = false;
    });
}

export function keepFocus() {
    document.addEventListener(
        "keydown",
        ({ key, target }) => notice(key === "Enter" && target.matches(BOX)),
        true,
    );
    document.addEventListener(
        "mousedown",
        ({ target }) => notice(target.closest('[role="option"]')),
        true,
    );
    document.addEventListener("focusout", ({ target, relatedTarget }) => {
        if (chose && !relatedTarget && target.matches(BOX)) queueMicrotask(() => focus(target));
    });
}

// Gradio opens the list of a box that gets the focus; it is not told.
function focus(box) {
    const hide = (event) => event.stopImmediatePropagation();
    window.addEventListener("focus", hide, true);
    box.focus({ preventScroll: true });
    window.removeEventListener("focus", hide, true);
}
