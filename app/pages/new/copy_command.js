// Copies the command that trains what the form shows, without a browser.

import { copyText, field, send } from "../../shared/dom.js";

export class CopyCommand {
    // form: returns the form as last checked.
    constructor(element, form) {
        this.root = element;
        this.form = form;
        this.button = element.querySelector('[data-part="copy"]');
        this.button.addEventListener("click", () => this.copy());
    }

    async copy() {
        const problem = field(this.root, "copy-problem");
        const code = field(this.root, "command");
        problem.textContent = "";
        try {
            const { preset, shown } = this.form();
            const { command } = await send("/api/command", { preset, shown });
            code.textContent = command;
            await copyText(this.button, code);
        } catch (error) {
            problem.textContent = error.message;
        }
    }
}
