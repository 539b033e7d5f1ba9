// Creates and finds nodes, and sends requests to the server.

const TIMEOUT = 4000;
const LONG_TIMEOUT = 60000;
const COPIED_SHOWN = 1500;
const AWAY = [502, 503, 504]; // a proxy in front of the server sends these in its place

// Creates a node. Attributes that are functions become listeners for the event of their name; those
// that are undefined, null or false are left out, and so are empty children.
export function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
        if (typeof value === "function") node.addEventListener(name, value);
        else if ((value ?? false) !== false) node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => (child ?? "") !== ""));
    return node;
}

// The words of a sentence, with what stands between backticks as code.
export function inCode(sentence) {
    const parts = sentence.split("`");
    if (parts.length % 2 === 0) return [sentence];
    return parts.map((part, number) => (number % 2 ? el("code", {}, part) : part));
}

export const field = (root, name) => root.querySelector(`[data-field="${name}"]`);

// Text that is already there is not replaced: a person's selection in it is kept, and a live region
// reads it only once.
export function setText(node, text) {
    if (node.textContent !== text) node.textContent = text;
}

export const isShown = (node) => node.isConnected && node.offsetParent !== null;

// Sends a request to the server and returns its answer: GET without a body, `method` with one.
// `given` is a signal that aborts the request. Throws an error whose message is a sentence for the
// page. The error is `unreachable` if no server answered, and otherwise has the `status` of the
// answer.
export async function send(path, body, given, method = "POST") {
    const timeout = AbortSignal.timeout(body === undefined ? TIMEOUT : LONG_TIMEOUT);
    const signal = given ? AbortSignal.any([given, timeout]) : timeout;
    let answer, value;
    try {
        answer = await fetch(path, { ...optionsFor(body, method), signal });
        // An answer that breaks off is none.
        value = await answer.json().catch((cause) => {
            if (answer.ok) throw cause;
        });
    } catch (cause) {
        const error = new Error("The server does not answer.", { cause });
        throw Object.assign(error, { unreachable: true });
    }
    if (answer.ok) return value;
    const error = new Error(value?.error || `The server answered ${answer.status}.`);
    throw Object.assign(error, {
        status: answer.status,
        unreachable: AWAY.includes(answer.status),
    });
}

function optionsFor(body, method) {
    if (body === undefined) return {};
    const headers = { "content-type": "application/json" };
    return { method, headers, body: JSON.stringify(body) };
}

// Copies the text of `node`; the button shows the result for a moment.
export async function copyText(button, node) {
    let copied = true;
    button.dataset.label ??= button.textContent;
    try {
        await navigator.clipboard.writeText(node.textContent);
    } catch {
        // Browsers let only pages from this machine or over https write to the clipboard.
        getSelection().selectAllChildren(node);
        copied = document.execCommand("copy");
    }
    button.textContent = copied ? "Copied" : "Not allowed here";
    setTimeout(() => {
        button.textContent = button.dataset.label;
    }, COPIED_SHOWN);
}
