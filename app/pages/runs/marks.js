// The runs that are pinned, and the baseline that others are compared with. The browser keeps both.

const KEPT = "ramstream-run-marks";

export class Marks {
    // changed() is called when a mark was set or taken back.
    constructor(changed) {
        this.changed = changed;
        const { pinned, baseline } = read();
        this.pinned = Array.isArray(pinned) ? pinned.map(String) : [];
        this.baseline = typeof baseline === "string" ? baseline : "";
    }

    isPinned(id) {
        return this.pinned.includes(id);
    }

    pin(id) {
        this.pinned = this.isPinned(id)
            ? this.pinned.filter((other) => other !== id)
            : [...this.pinned, id];
        this.keep();
    }

    setBaseline(id) {
        this.baseline = this.baseline === id ? "" : id;
        this.keep();
    }

    // The runs were deleted.
    forget(ids) {
        this.pinned = this.pinned.filter((id) => !ids.includes(id));
        if (ids.includes(this.baseline)) this.baseline = "";
        this.keep();
    }

    keep() {
        const { pinned, baseline } = this;
        localStorage.setItem(KEPT, JSON.stringify({ pinned, baseline }));
        this.changed();
    }
}

function read() {
    try {
        return JSON.parse(localStorage.getItem(KEPT) ?? "{}") ?? {};
    } catch {
        return {};
    }
}
