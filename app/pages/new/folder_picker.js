// Browses the folders that the command line names, to choose a file or a folder as the data.

import { inBytes } from "../../shared/bytes.js";
import { el, field, send } from "../../shared/dom.js";

export class FolderPicker {
    // choose: is called with the path of a file or of a folder.
    constructor(root, choose) {
        this.root = root;
        this.choose = choose;
        this.list = root.querySelector('[data-part="entries"]');
        const browse = root.querySelector('[data-part="browse"]');
        browse.hidden = false;
        browse.addEventListener("toggle", () => {
            if (browse.open) this.attempt(() => this.showRoots());
        });
    }

    report(text) {
        field(this.root, "browse-caption").textContent = text;
    }

    async attempt(work) {
        try {
            await work();
        } catch (error) {
            this.report(error.message);
        }
    }

    async showRoots() {
        const { folders } = await send("/api/folders");
        this.report("");
        this.draw(folders.map((path, number) => this.folderRow(path, number, [])));
    }

    // Shows the folder whose names below root `number` are `names`.
    async show(number, names) {
        const below = encodeURIComponent(names.join("/"));
        const found = await send(`/api/folders/${number}?below=${below}`);
        const left = found.left_out ? ` ${found.left_out} more are not shown.` : "";
        this.report(`${found.path}${left}`);
        const up = names.length
            ? () => this.show(number, names.slice(0, -1))
            : () => this.showRoots();
        this.draw([
            el(
                "li",
                {},
                this.button("Back", () => this.attempt(up)),
                this.button("Use this folder", () => this.choose(found.path)),
            ),
            ...found.folders.map((name) => this.folderRow(`${name}/`, number, [...names, name])),
            ...found.files.map((file) => this.fileRow(file)),
        ]);
    }

    // The focus stays in the list, whose button was pressed.
    draw(rows) {
        const hadFocus = this.list.contains(document.activeElement);
        this.list.replaceChildren(...rows);
        if (hadFocus) this.list.querySelector("button")?.focus();
    }

    folderRow(shown, number, names) {
        const open = () => this.attempt(() => this.show(number, names));
        const name = el("span", { class: "rs-data-files-name" }, shown);
        return el("li", {}, name, this.button("Open", open));
    }

    fileRow({ name, bytes, path }) {
        const shown = el(
            "span",
            { class: "rs-data-files-name" },
            name,
            el("small", {}, inBytes(bytes)),
        );
        return el(
            "li",
            {},
            shown,
            this.button("Use", () => this.choose(path)),
        );
    }

    button(text, click) {
        return el("button", { type: "button", click }, text);
    }
}
