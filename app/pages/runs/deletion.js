// Asks before runs are deleted: it names each with its date and its size, and says how much is
// freed.

import { inBytes } from "../../shared/bytes.js";
import { el, send } from "../../shared/dom.js";
import { dayText } from "../../shared/moments.js";

const NAMED = 12; // number of runs that the dialog names, at most

export class Deletion {
    // place: the element that the dialog belongs to. deleted(ids) is called with the runs that are
    // gone.
    constructor(place, deleted) {
        this.place = place;
        this.deleted = deleted;
    }

    // Returns a promise: whether a person agreed.
    ask(runs) {
        const dialog = dialogAbout(runs);
        this.place.append(dialog);
        return new Promise((resolve) => {
            dialog.addEventListener("close", () => {
                dialog.remove();
                resolve(dialog.returnValue === "delete");
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

function dialogAbout(runs) {
    const title = `Delete ${runs.length === 1 ? runs[0].name : `${runs.length} runs`}?`;
    const named = runs.slice(0, NAMED).map((run) => el("li", { title: run.id }, ...about(run)));
    if (runs.length > NAMED) named.push(el("li", {}, `and ${runs.length - NAMED} more`));
    const lost = `Curves, logs and checkpoints${sizeOf(runs)} are deleted for good.`;
    const kept = "Models that you exported to other folders stay.";
    const whatToDo = el(
        "form",
        { method: "dialog" },
        el("button", { value: "keep", autofocus: "" }, "Cancel"),
        el("button", { value: "delete", class: "rs-danger" }, "Delete"),
    );
    return el(
        "dialog",
        { class: "rs-dialog", "data-part": "delete", "aria-label": title },
        el("h2", {}, title),
        el("ul", {}, ...named),
        el("p", {}, [lost, exportsOf(runs), kept].filter(Boolean).join(" ")),
        whatToDo,
    );
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
