// Asks before runs are deleted: it names each with its id, its date and its size.

import { el, field, send } from "../../shared/dom.js";

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
        const named = runs.slice(0, NAMED).map((run) => el("li", {}, about(run)));
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
    const date = new Date(run.created * 1000).toLocaleDateString([], { dateStyle: "medium" });
    return [run.name, run.id, date, run.size].filter(Boolean).join(" · ");
}
