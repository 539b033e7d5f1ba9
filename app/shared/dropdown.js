// A button that opens a list of buttons. A choice, Escape and the focus elsewhere close it.

export class Dropdown {
    // root: a node with a button and, behind it, the list.
    constructor(root) {
        [this.button, this.list] = root.children;
        this.button.setAttribute("aria-expanded", "false");
        this.list.hidden = true;
        this.button.addEventListener("click", () => this.toggle(this.list.hidden));
        // Before the button acts: a dialog that it opens gives the focus back to what has it.
        this.list.addEventListener("click", () => this.close(), { capture: true });
        root.addEventListener("keydown", (event) => {
            if (event.key === "Escape" && !this.list.hidden) this.close();
        });
        root.addEventListener("focusout", ({ relatedTarget }) => {
            if (!root.contains(relatedTarget)) this.toggle(false);
        });
        // Safari gives a pressed button no focus.
        document.addEventListener("pointerdown", ({ target }) => {
            if (!root.contains(target)) this.toggle(false);
        });
    }

    // The focus does not stay in a list that is hidden.
    close() {
        this.toggle(false);
        this.button.focus({ preventScroll: true });
    }

    toggle(isOpen) {
        this.list.hidden = !isOpen;
        this.button.setAttribute("aria-expanded", String(isOpen));
    }
}
