// The preview of the data: the first rows with what is trained marked, and how long the examples
// are.

import { SmallFigure } from "../charts/small_figure.js";
import { el, field } from "../common/dom.js";
import { Mapping } from "./mapping.js";

const PATIENCE = 600;
const typed = () => document.querySelector('#field-data-source [data-testid="textbox"]')?.value;

export function drawPreview(place, preview) {
    // What is shown stays until the answer is there; only one that takes long says so.
    clearTimeout(place.late);
    const { element } = place;
    element.querySelector(".rs-preview").setAttribute("aria-busy", Boolean(preview.pending));
    if (preview.pending) {
        place.late = setTimeout(() => {
            field(element, "understood").textContent = "Reading the first rows …";
        }, PATIENCE);
        return;
    }
    const understood = field(element, "understood");
    const rows = field(element, "rows");
    const key = element.querySelector(".rs-preview-key");
    const failed = Boolean(preview.error);
    place.mapping ??= new Mapping(element.querySelector(".rs-mapping"), (changes) => {
        if (place.props.value.given?.["data.source"] !== typed()) {
            // other data were typed since: their preview is on its way
            place.mapping.say(
                "These columns are of the data before; those of the new data are looked up.",
            );
            return;
        }
        place.props.value = { ...place.props.value, changes };
        place.trigger("input"); // Gradio, which has the form, takes the changes over
    });
    place.mapping.show(preview.mapping ?? null, failed);
    understood.classList.toggle("rs-error", failed);
    key.hidden = failed || !preview.rows;
    if (!preview.rows) {
        understood.textContent = preview.error ?? "";
        rows.replaceChildren();
        field(element, "warnings").replaceChildren();
        lengths(place, null);
        return;
    }
    const columns = preview.columns.map(([name, meaning]) => `${name} → ${meaning}`).join(", ");
    const how =
        preview.mapping?.state === "guess"
            ? "A guess:"
            : preview.format_detected
              ? "Recognised as"
              : "Read as";
    understood.textContent = `${how} ${preview.format}` + (columns ? `: ${columns}.` : ".");
    const notes = [
        `${preview.percent_trained} % of the tokens of the first ${preview.rows_measured} rows`,
    ];
    if (preview.rows_skipped) notes.push(`${preview.rows_skipped} are skipped`);
    field(element, "counted").textContent = `· ${notes.join(" · ")}`;
    rows.replaceChildren(
        ...preview.rows.map((row) =>
            el(
                "li",
                {},
                el(
                    "p",
                    { class: "rs-tokens" },
                    ...(row.skipped
                        ? [el("em", {}, `Skipped: ${row.skipped}`)]
                        : row.pieces.map((piece) =>
                              el(piece.trained ? "mark" : "span", {}, piece.text),
                          )),
                ),
                el(
                    "small",
                    {},
                    `${row.where} · ${row.tokens} tokens, ${row.trained_tokens} trained${row.cut ? " · cut" : ""}`,
                ),
            ),
        ),
    );
    field(element, "warnings").replaceChildren(
        ...preview.warnings.map((warning) => el("li", {}, warning)),
    );
    lengths(place, preview);
}

// How long the examples are; null takes the figure away.
function lengths(place, preview) {
    const root = place.element.querySelector(".rs-lengths");
    root.hidden = !preview?.said;
    if (root.hidden) return;
    place.lengths ??= new SmallFigure(root.querySelector(".rs-lengths-plot"));
    place.lengths.show(preview.lengths, preview.said);
    root.querySelector("p").textContent = preview.said;
}
