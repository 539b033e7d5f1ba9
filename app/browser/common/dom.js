// Makes nodes, finds them, and talks to the server.

const TIMEOUT = 4000;
const LONG_TIMEOUT = 60000;
const COPIED_SHOWN = 1500;
const AWAY = [502, 503, 504]; // a proxy in front of the server answers for it

// Makes a node. Attributes that are functions listen to the event of their name; those that are
// undefined, null or false are left out, and so are children that are nothing.
export function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
        if (typeof value === "function") node.addEventListener(name, value);
        else if ((value ?? false) !== false) node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => (child ?? "") !== ""));
    return node;
}

export const field = (root, name) => root.querySelector(`[data-field="${name}"]`);

// Text that is there already is left: what somebody has marked in it stays marked, and a live
// region says it once.
export function setText(node, text) {
    if (node.textContent !== text) node.textContent = text;
}

export const isShown = (node) => node.isConnected && node.offsetParent !== null;

// Asks the server and returns its answer: GET without a body, POST with one. `given` is a signal
// that gives the request up. Throws an error whose message is a sentence for the page; it is
// `unreachable` where no server has answered, and has the `status` of the answer otherwise.
export async function send(path, body, given) {
    const timeout = AbortSignal.timeout(body === undefined ? TIMEOUT : LONG_TIMEOUT);
    const signal = given ? AbortSignal.any([given, timeout]) : timeout;
    let answer;
    try {
        answer = await fetch(path, { ...optionsFor(body), signal });
    } catch (cause) {
        const error = new Error("The server does not answer.", { cause });
        throw Object.assign(error, { unreachable: true });
    }
    const value = await answer.json().catch(() => ({}));
    if (answer.ok) return value;
    const error = new Error(value.error || `The server answered ${answer.status}.`);
    throw Object.assign(error, {
        status: answer.status,
        unreachable: AWAY.includes(answer.status),
    });
}

function optionsFor(body) {
    if (body === undefined) return {};
    const headers = { "content-type": "application/json" };
    return { method: "POST", headers, body: JSON.stringify(body) };
}

// Copies the text of `node`; the button that asked for it, which reads Copy, says for a moment what
// came of it.
export async function copyText(button, node) {
    let copied = true;
    try {
        await navigator.clipboard.writeText(node.textContent);
    } catch {
        // Only pages of this machine, or by https, may write to the clipboard themselves.
        getSelection().selectAllChildren(node);
        copied = document.execCommand("copy");
    }
    button.textContent = copied ? "Copied" : "Not allowed here";
    setTimeout(() => {
        button.textContent = "Copy";
    }, COPIED_SHOWN);
}
