// The files of a person below the data source: what is uploaded, by a button or by dropping, what
// was uploaded before, and the folders of the server that may be browsed.

import { inBytes } from "../../shared/bytes.js";
import { el, field, isShown, send } from "../../shared/dom.js";
import { momentText } from "../../shared/moments.js";
import { give } from "./changes.js";
import { FolderPicker } from "./folder_picker.js";
import { Mix } from "./mix.js";
import { sendFile } from "./send_file.js";

const LATER = 1500; // ms: the page opens first

export class DataFiles {
    constructor(place) {
        this.place = place;
        this.root = place.element.querySelector(".rs-data-files");
        this.isSending = false;
        this.mix = new Mix(this.root, (source) => give(place, { "data.source": source }));
        const input = this.part("input");
        this.part("choose").addEventListener("click", () => input.click());
        input.addEventListener("change", () => {
            this.take([...input.files]);
            input.value = ""; // the same file may be chosen again
        });
        this.part("stored").addEventListener("toggle", () => this.showStored());
        if (place.props.value?.has_folders)
            new FolderPicker(this.root, (path) => this.choose([path]));
        this.listenForDrops();
        setTimeout(() => this.lookForStored(), LATER);
        window.addEventListener("beforeunload", (event) => {
            if (this.isSending) event.preventDefault();
        });
    }

    part(name) {
        return this.root.querySelector(`[data-part="${name}"]`);
    }

    // Takes each form that is checked.
    took({ shown }) {
        this.mix.took(shown["data.source"] ?? "");
    }

    report(text) {
        field(this.root, "caption").textContent = text;
    }

    // Files may be dropped on the whole page. Otherwise the browser would open a file that misses a
    // small area, and what was typed would be lost.
    listenForDrops() {
        const takesFiles = ({ dataTransfer }) =>
            isShown(this.root) && [...(dataTransfer?.types ?? [])].includes("Files");
        const mark = (isOver) => this.root.classList.toggle("rs-data-files-over", isOver);
        document.addEventListener("dragover", (event) => {
            if (!takesFiles(event)) return;
            event.preventDefault();
            mark(true);
        });
        document.addEventListener("dragleave", ({ relatedTarget }) => {
            if (!relatedTarget) mark(false);
        });
        const drop = (event) => {
            mark(false);
            if (!takesFiles(event)) return;
            event.preventDefault();
            event.stopPropagation();
            this.take([...event.dataTransfer.files]);
        };
        // Gradio's boxes must not take the files first.
        document.addEventListener("drop", drop, { capture: true });
    }

    // -------------------------------------------------------------- uploading

    // Uploads files one after the other, then makes those that arrived the data of the form.
    async take(files) {
        if (!files.length) return;
        if (this.isSending) {
            this.report("Files are being uploaded; add more when they have arrived.");
            return;
        }
        this.isSending = true;
        this.report("");
        this.part("choose").disabled = true;
        const rows = files.map((file) => new SentFile(file));
        this.part("sending").replaceChildren(...rows.map(({ node }) => node));
        const paths = [];
        for (const row of rows) {
            const upload = await row.send();
            if (!upload) continue;
            paths.push(upload.path);
            this.mix.know([upload]);
            row.node.remove(); // it is listed among the data
        }
        this.isSending = false;
        this.part("choose").disabled = false;
        if (paths.length) this.choose(paths);
        await this.showStored();
    }

    // Makes these paths the data source of the form, or adds them to it.
    choose(paths) {
        if (this.mix.isAdding) this.mix.add(paths);
        else this.mix.write(paths.map((source) => ({ source })));
    }

    // -------------------------------------------------------------- what was uploaded before

    // What was uploaded before is offered where there is any.
    async lookForStored() {
        const answer = await send("/api/uploads").catch(() => null);
        this.part("stored").hidden = !answer?.uploads.length;
        if (answer) this.mix.know(answer.uploads);
    }

    async showStored() {
        await this.lookForStored();
        if (!this.part("stored").open) return;
        await this.tryStored(() => send("/api/uploads"));
    }

    // Shows the list that `ask` answers with, or why it cannot.
    async tryStored(ask) {
        let caption = "";
        try {
            const { uploads, problem } = await ask();
            this.part("uploads").replaceChildren(...uploads.map((each) => this.storedRow(each)));
            caption = problem || (uploads.length ? "" : "Nothing was uploaded yet.");
        } catch (error) {
            caption = error.message;
        }
        field(this.root, "stored-caption").textContent = caption;
    }

    storedRow(upload) {
        const { name, path, bytes, uploaded } = upload;
        const when = momentText(uploaded);
        return el(
            "li",
            {},
            el(
                "span",
                { class: "rs-data-files-name" },
                name,
                el("small", {}, `${inBytes(bytes)} · ${when}`),
            ),
            el("button", { type: "button", click: () => this.choose([path]) }, "Use"),
            el("button", { type: "button", click: () => this.remove(upload) }, "Remove"),
        );
    }

    remove({ id, name }) {
        const dialog = this.part("remove");
        field(this.root, "remove-name").textContent = name;
        dialog.returnValue = "keep";
        const closed = () => {
            if (dialog.returnValue !== "remove") return;
            this.tryStored(() => send(`/api/uploads/${id}`, {}, undefined, "DELETE"));
        };
        dialog.addEventListener("close", closed, { once: true });
        dialog.showModal();
    }
}

// One file under way: its name, how much of it has arrived, and Cancel.
class SentFile {
    constructor(file) {
        this.file = file;
        this.stop = new AbortController();
        this.bar = el("progress", { max: 1, value: 0, "aria-label": `Upload of ${file.name}` });
        this.caption = el("small", {}, "waiting");
        const cancel = () => {
            this.stop.abort();
            this.end("cancelled");
        };
        this.button = el("button", { type: "button", click: cancel }, "Cancel");
        const name = el("span", { class: "rs-data-files-name" }, file.name, this.caption);
        this.node = el("li", {}, name, this.bar, this.button);
    }

    // Returns the upload, or null if it was cancelled or refused.
    async send() {
        if (this.stop.signal.aborted) return null;
        try {
            const upload = await sendFile(this.file, this.stop.signal, (sent) => this.draw(sent));
            return upload;
        } catch (error) {
            if (!this.stop.signal.aborted) this.end(error.message, true);
            return null;
        }
    }

    draw(sent) {
        const { size } = this.file;
        this.bar.value = size ? sent / size : 1;
        this.caption.textContent =
            sent < size ? `${inBytes(sent)} of ${inBytes(size)}` : "waiting for the disk";
    }

    end(text, isError = false) {
        this.caption.textContent = text;
        this.caption.classList.toggle("rs-error", isError);
        if (isError) this.caption.setAttribute("role", "alert");
        this.bar.remove();
        this.button.remove();
    }
}
