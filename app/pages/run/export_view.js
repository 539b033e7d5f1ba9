// Export: where the model of a run was exported to; exports it, uploads it to the hub, and shows
// how to use it.

import { inBytes } from "../../shared/bytes.js";
import { copyText, el, field, send } from "../../shared/dom.js";
import { JobView, noticeJobs } from "../../shared/jobs.js";
import { shellWord } from "../../shared/shell.js";
import { ServeCard } from "../serve/serve_card.js";
import { ExportUses, exportOption } from "./export_uses.js";
import { commandRow } from "./settings_view.js";

const UNEXPORTED =
    "An export is your model on the disk: a folder (transformers, vLLM) or a GGUF file " +
    "(llama.cpp, Ollama, LM Studio). You can upload it to Hugging Face from here.";

const NO_GGUF = "GGUF file (not for this model)";

// Precisions by form, the usual one first.
const PRECISIONS = {
    folder: { auto: "same as training", bfloat16: "bfloat16", float32: "float32 (full)" },
    gguf: {
        q8_0: "Q8_0 (8 bits)",
        bfloat16: "bfloat16",
        float16: "float16",
        float32: "float32 (full)",
    },
};

export class ExportView {
    // changed() is called when the run is served to programs, or is not any more.
    constructor(root, changed) {
        this.root = root;
        this.exporting = new ExportJob(root, "export", "exporting", (wanted) =>
            send(`/api/runs/${encodeURIComponent(this.run)}/export`, wanted),
        );
        this.serving = new ServeCard(root, changed);
        this.uses = new ExportUses(root);
        this.pushing = new ExportJob(root, "push", "pushing", ({ folder, other, ...wanted }) =>
            send(`/api/runs/${encodeURIComponent(this.run)}/push`, {
                ...wanted,
                folder: folder || other,
            }),
        );
        this.pushing.form.elements.folder.addEventListener("change", () => this.askForFolder());
        // The next poll reads where it is, and offers another folder for the next one.
        this.exporting.done = () => {
            this.exporting.form.elements.folder.value = "";
            // The list of exports shows it; a screen reader reads the sentence.
            this.exporting.caption.classList.add("rs-hidden");
            this.version = null;
        };
        const { form, dtype, folder } = this.exporting.form.elements;
        form.addEventListener("change", () => this.offerPrecisions());
        dtype.addEventListener("change", () => this.showSize());
        folder.addEventListener("change", () => this.readRoom());
        this.exporting.form.addEventListener("input", () => this.showCommands());
        this.ggufOption = form.querySelector('option[value="gguf"]');
        this.ggufLabel = this.ggufOption.textContent;
        this.clear();
    }

    // What will be written and whether the disk of the folder has room for it.
    showSize() {
        const { form, dtype } = this.exporting.form.elements;
        const bytes = this.sizes[form.value]?.[dtype.value];
        const isKnown = bytes !== undefined && this.free !== null;
        const isShort = isKnown && bytes > this.free;
        const file = form.value === "gguf" ? `${this.ggufNames[dtype.value]}: ` : "";
        const room = isKnown ? `${inBytes(bytes)} of weights, ${inBytes(this.free)} free.` : "";
        const line = field(this.root, "export-size");
        line.textContent = isShort ? `Not enough disk space. ${file}${room}` : room && file + room;
        line.classList.toggle("rs-error", isShort);
        this.exporting.form.querySelector("button").disabled = isShort;
    }

    // The free space of the folder that was typed; a name that is no folder is told at the export.
    async readRoom() {
        const { run, exporting } = this;
        const folder = exporting.form.elements.folder.value;
        const asked = new URLSearchParams({ folder });
        const free = await send(`/api/runs/${encodeURIComponent(run)}/room?${asked}`).then(
            (room) => room.free,
            () => null,
        );
        if (run !== this.run) return;
        if (folder !== exporting.form.elements.folder.value) {
            this.readRoom(); // it was typed over meanwhile
            return;
        }
        this.free = free;
        this.showSize();
    }

    offerPrecisions() {
        const { form, dtype } = this.exporting.form.elements;
        const offered = Object.entries(PRECISIONS[form.value] ?? PRECISIONS.folder);
        dtype.replaceChildren(...offered.map(([value, text]) => el("option", { value }, text)));
        this.showSize();
        this.showCommands();
    }

    clear() {
        this.run = null;
        this.version = null;
        this.sizes = {};
        this.command = "";
        this.rows = [];
        this.ggufNames = {};
        this.free = null;
        this.exporting.clear();
        this.offerPrecisions();
        this.pushing.clear();
        this.root.querySelector('[data-part="push"]').hidden = true;
        this.serving.clear();
        field(this.root, "export-weights").textContent = "";
        for (const name of ["export-fault", "exported-title", "exported-about", "login"])
            field(this.root, name).textContent = "";
        this.root.querySelector('[data-part="exports"]').replaceChildren();
        this.uses.clear();
        this.showCommands();
    }

    // Reads what can be exported: again when the state of the run has changed.
    async refresh({ run_id, bar }) {
        const version = JSON.stringify([run_id, bar.state, bar.begins_anew]);
        if (version === this.version) {
            this.serving.poll();
            return;
        }
        this.version = version;
        this.run = this.exporting.run = this.pushing.run = run_id;
        try {
            const details = await send(`/api/runs/${encodeURIComponent(run_id)}/details`);
            if (this.run === run_id) this.show(details.export);
        } catch (error) {
            this.version = null;
            this.exporting.report(error.message, true);
        }
    }

    show(details) {
        const { exports, folder, can_export, can_serve, has_adapters, caption } = details;
        this.showExports(details);
        this.exporting.form.elements.folder.value ||= folder; // what a person has typed stays
        field(this.root, "export-weights").textContent = caption;
        this.exporting.form.hidden = !can_export;
        this.sizes = details.sizes;
        this.ggufNames = details.gguf_names;
        this.readRoom();
        const adapters = this.exporting.form.querySelector('option[value="adapter"]');
        adapters.hidden = adapters.disabled = !has_adapters;
        this.offerGguf(details.no_gguf);
        this.offerUpload(details);
        this.serving.setRun(this.run, can_serve, details.question);
        this.uses.show(exports);
        this.command = can_export ? details.command : "";
        this.rows = details.rows;
        this.showCommands();
    }

    // whyNot: why there is no GGUF file of the model, or an empty text.
    offerGguf(whyNot) {
        this.ggufOption.disabled = Boolean(whyNot);
        this.ggufOption.textContent = whyNot ? NO_GGUF : this.ggufLabel;
        field(this.root, "no-gguf").textContent = whyNot;
    }

    // What a person has chosen stays for as long as it is there.
    offerUpload({ exports, login }) {
        const { folder } = this.pushing.form.elements;
        const chosen = this.pushing.form.hidden ? exports[0]?.path : folder.value;
        const other = el("option", { value: "" }, "Another folder …");
        folder.replaceChildren(...exports.map(exportOption), other);
        const isThere = chosen === "" || exports.some(({ path }) => path === chosen);
        folder.value = isThere ? chosen : (exports[0]?.path ?? "");
        this.pushing.form.hidden = !exports.length;
        this.root.querySelector('[data-part="push"]').hidden = !exports.length;
        field(this.root, "login").replaceChildren(...aboutLogin(login));
        this.askForFolder();
    }

    askForFolder() {
        const { folder, other } = this.pushing.form.elements;
        other.disabled = folder.value !== "";
        other.parentElement.hidden = other.disabled;
    }

    showExports({ exports, fault }) {
        const title = exports.length ? "✓ Exported" : "Not exported yet";
        field(this.root, "exported-title").textContent = title;
        field(this.root, "exported-about").textContent = exports.length ? "" : UNEXPORTED;
        field(this.root, "export-fault").textContent = fault;
        const list = this.root.querySelector('[data-part="exports"]');
        list.replaceChildren(...exports.map((each) => exportNode(this.run, each)));
        this.exporting.form.querySelector("button").classList.toggle("rs-primary", !exports.length);
    }

    // The command that exports is that of the form as it is filled in.
    showCommands() {
        const { folder, form, dtype } = this.exporting.form.elements;
        const words = [this.command, shellWord(folder.value.trim()), "--form", form.value];
        if (dtype.value !== "auto") words.push("--dtype", dtype.value);
        const own = { label: "Export without a browser", text: words.join(" ") };
        const rows = this.command ? [own, ...this.rows] : this.rows;
        this.root.querySelector('[data-part="export-commands"]').hidden = !rows.length;
        const list = this.root.querySelector('[data-part="export-rows"]');
        list.replaceChildren(...rows.map(commandRow));
    }
}

// Whether there is a token is known; whether the hub takes it shows at the upload.
function aboutLogin(hasToken) {
    const what = "This uploads your model.";
    if (hasToken) return [`${what} A Hugging Face token was found on this machine.`];
    return [`${what} You are not logged in: run `, el("code", {}, "hf auth login"), "."];
}

// shownPath: that of a single file leads to the file.
function exportNode(run, { path, shown_path: shownPath, label, note, check, is_other, files }) {
    const code = el("code", {}, shownPath);
    const button = el(
        "button",
        {
            type: "button",
            class: "rs-small",
            "aria-label": `Copy path: ${shownPath}`,
            click: () => copyText(button, code),
        },
        "Copy path",
    );
    const parts = [el("strong", {}, label), code];
    if (note) parts.push(el("small", {}, note));
    if (check) parts.push(el("small", { class: is_other ? "rs-error" : "" }, check));
    if (files.length) parts.push(downloads(run, path, files));
    return el("li", {}, el("div", {}, ...parts), button);
}

// One click takes all files; each of them alone is a click further.
function downloads(run, folder, files) {
    const id = encodeURIComponent(run);
    const links = files.map(({ name, bytes }) => {
        const href = `/api/runs/${id}/file?${new URLSearchParams({ folder, name })}`;
        const link = el("a", { href, download: name }, name);
        return el("li", {}, link, el("small", {}, inBytes(bytes)));
    });
    const all = inBytes(files.reduce((sum, { bytes }) => sum + bytes, 0));
    if (files.length === 1) {
        const href = links[0].querySelector("a").href;
        return el("a", { href, download: files[0].name, class: "rs-button" }, `Download (${all})`);
    }
    const href = `/api/runs/${id}/archive?${new URLSearchParams({ folder })}`;
    return el(
        "div",
        { class: "rs-downloads" },
        el("a", { href, download: "", class: "rs-button" }, `Download all (ZIP, ${all})`),
        el("details", {}, el("summary", {}, `${files.length} files`), el("ul", {}, ...links)),
    );
}

// A form that starts a job of the run, shows its progress, and says what came of it.
class ExportJob {
    // begin(wanted) sends the values of the form to the server, and gives the job.
    constructor(root, name, progress, begin) {
        this.begin = begin;
        this.run = null;
        this.done = () => {};
        this.form = root.querySelector(`[data-part="${name}"] form`);
        this.caption = field(root, `${name}-caption`);
        this.view = new JobView(root.querySelector(`[data-part="${progress}"]`));
        this.form.addEventListener("submit", (event) => {
            event.preventDefault();
            this.start();
        });
    }

    // The form comes back when the run is known: until then a click would ask for no run's.
    clear() {
        this.run = null;
        this.form.reset();
        this.form.hidden = true;
        this.report("");
        this.view.show(null);
    }

    async start() {
        const { run, form } = this;
        const button = form.querySelector("button");
        button.disabled = true;
        this.report("");
        try {
            const wanted = Object.fromEntries(new FormData(form));
            const job = await this.begin(wanted);
            noticeJobs();
            const over = await this.view.follow(job);
            if (over.state === "failed") throw new Error(over.error);
            if (run === this.run) {
                this.report(over.result);
                if (over.state === "done") this.done(wanted);
            }
        } catch (error) {
            if (run === this.run) this.report(error.message, true);
        }
        this.view.show(null); // the result is shown in its place
        button.disabled = false;
    }

    report(text, isError = false) {
        this.caption.textContent = text;
        this.caption.classList.remove("rs-hidden");
        this.caption.classList.toggle("rs-error", isError);
    }
}
