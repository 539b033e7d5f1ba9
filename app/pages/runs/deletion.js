// Asks before runs are deleted: it names each with its date and its size, and says how much is
// freed.

import { inBytes } from "../../shared/bytes.js";
import { el, field, send } from "../../shared/dom.js";
import { dayText } from "../../shared/moments.js";

const NAMED = 12; // number of runs that the dialog names, at most

export class Deletion {
    // deleted(ids) is called with the runs that are gone.
    constructor(root, deleted) {
        this.root = root;
        this.deleted = deleted;
        this.dialog = root.querySelector('[data-part="delete"]');
    }

    // Returns a promise: whether a person agreed.
    ask(runs) {
        const { dialog } = this;
        const one = runs.length === 1;
        field(this.root, "delete-name").textContent = one ? runs[0].name : `${runs.length} runs`;
        field(this.root, "delete-size").textContent = sizeOf(runs);
        field(this.root, "delete-exports").textContent = exportsOf(runs);
        const named = runs.slice(0, NAMED).map((run) => el("li", { title: run.id }, ...about(run)));
        if (runs.length > NAMED) named.push(el("li", {}, `and ${runs.length - NAMED} more`));
        dialog.querySelector('[data-part="delete-runs"]').replaceChildren(...named);
        dialog.returnValue = "keep";
        return new Promise((resolve) => {
            dialog.addEventListener("close", () => resolve(dialog.returnValue === "delete"), {
                once: true,
            });
            dialog.showModal();
        });
    }

    // Deletes the runs one after the other. Throws the first refusal, once all have been tried.
    async delete(runs) {
        const gone = [];
        let refusal = null;
        for (const run of runs) {
            try {
                await send(`/api/runs/${encodeURIComponent(run.id)}/delete`, {});
                gone.push(run.id);
            } catch (error) {
                refusal ??= error;
            }
        }
        await this.deleted(gone);
        if (refusal) throw refusal;
    }
}

function about(run) {
    const facts = [dayText(run.created), run.size].filter(Boolean).join(" · ");
    return [el("strong", {}, run.name), el("span", {}, facts)];
}

// A run's own export lies in its folder.
function exportsOf(runs) {
    if (!runs.some((run) => run.has_export)) return "";
    return runs.length === 1
        ? "Its exported model is deleted too."
        : "Their exported models are deleted too.";
}

// The bytes of folders that were not measured yet are not known.
function sizeOf(runs) {
    const known = runs.map(({ bytes }) => bytes).filter((bytes) => bytes !== null);
    if (!known.length) return "";
    const least = known.length < runs.length ? "at least " : "";
    return ` (${least}${inBytes(known.reduce((sum, bytes) => sum + bytes, 0))})`;
}
