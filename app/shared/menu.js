// A menu that opens at a button, over everything else.

import { el } from "./dom.js";

const GAP = 4; // px between the button and the menu
const STEPS = { ArrowDown: 1, ArrowUp: -1 };

// Places an open popover below its button, or above it where there is no room.
export function placeAt(button, node) {
    const { bottom, top, right } = button.getBoundingClientRect();
    const { width, height } = node.getBoundingClientRect();
    const isBelow = bottom + GAP + height <= innerHeight;
    const wanted = isBelow ? bottom + GAP : top - GAP - height;
    node.style.left = `${Math.max(GAP, right - width)}px`;
    node.style.top = `${Math.max(GAP, Math.min(wanted, innerHeight - height - GAP))}px`;
}

export class Menu {
    // place: the element that the menu belongs to. Its styles are those of the place.
    constructor(place) {
        this.node = el("div", { class: "rs-menu", role: "menu", popover: "auto" });
        place.append(this.node);
        this.node.addEventListener("keydown", (event) => this.move(event));
        this.node.addEventListener("toggle", ({ newState }) => {
            const isOpen = newState === "open";
            this.button?.setAttribute("aria-expanded", String(isOpen));
            if (!isOpen && this.node.contains(document.activeElement)) this.button?.focus();
        });
        this.node.addEventListener("focusout", ({ relatedTarget }) => {
            if (relatedTarget && !this.node.contains(relatedTarget)) this.close();
        });
        // The press closes the menu before the click reaches its button.
        document.addEventListener("pointerdown", ({ target }) => {
            this.isPressed = this.isOpen() && Boolean(this.button?.contains(target));
        });
        document.addEventListener("scroll", () => this.scrolled(), {
            capture: true,
            passive: true,
        });
    }

    isOpen() {
        return this.node.matches(":popover-open");
    }

    // items: objects with the name of the action (act), a label, whether it is dangerous, and
    // work(button), which is called with the button of the menu. A second click closes the menu.
    open(button, label, items) {
        const wasOpen = this.isPressed && button === this.button;
        this.isPressed = false;
        if (wasOpen) return;
        const { node } = this;
        this.button?.setAttribute("aria-expanded", "false");
        this.button = button;
        node.setAttribute("aria-label", label);
        node.replaceChildren(...items.map((item) => this.item(item)));
        node.showPopover();
        placeAt(button, node);
        node.firstElementChild?.focus({ preventScroll: true });
        this.top = button.getBoundingClientRect().top;
    }

    // The menu would stay where it is while its button scrolls away.
    scrolled() {
        const isAway = this.button?.getBoundingClientRect().top !== this.top;
        if (isAway) this.close();
    }

    close() {
        if (this.isOpen()) this.node.hidePopover();
    }

    item({ act, label, isDangerous, work }) {
        return el(
            "button",
            {
                type: "button",
                role: "menuitem",
                "data-act": act,
                class: isDangerous ? "rs-danger" : "",
                click: () => {
                    this.close();
                    work(this.button);
                },
            },
            label,
        );
    }

    move(event) {
        const step = STEPS[event.key];
        if (!step) return;
        event.preventDefault();
        const items = [...this.node.children];
        const next = items.indexOf(document.activeElement) + step;
        items[(next + items.length) % items.length].focus();
    }
}
