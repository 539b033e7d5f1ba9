// Making nodes, finding them, and talking to the server.

const TIMEOUT = 4000;
const LONG_TIMEOUT = 60000;
const COPIED_SHOWN = 1500;
const AWAY = [502, 503, 504]; // a proxy in front of the server answers for it

export function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
        if (typeof value === "function") node.addEventListener(name, value);
        else if (value !== undefined && value !== null && value !== false)
            node.setAttribute(name, value);
    }
    node.append(
        ...children.filter((child) => child !== null && child !== undefined && child !== ""),
    );
    return node;
}

export const field = (root, name) => root.querySelector(`[data-field="${name}"]`);
// Text that is there already is left: what somebody has marked in it stays marked, and a live
// region says it once.
export function setText(node, text) {
    if (node.textContent !== text) node.textContent = text;
}

export const isShown = (node) => node.isConnected && node.offsetParent !== null;

export async function send(path, body, given) {
    const options =
        body === undefined
            ? {}
            : {
                  method: "POST",
                  headers: { "content-type": "application/json" },
                  body: JSON.stringify(body),
              };
    const timeout = AbortSignal.timeout(body === undefined ? TIMEOUT : LONG_TIMEOUT);
    const signal = given ? AbortSignal.any([given, timeout]) : timeout;
    const answer = await fetch(path, { ...options, signal }).catch((error) => {
        throw Object.assign(new Error("The server does not answer."), {
            unreachable: true,
            cause: error,
        });
    });
    const value = await answer.json().catch(() => ({}));
    if (!answer.ok)
        throw Object.assign(new Error(value.error || `The server answered ${answer.status}.`), {
            status: answer.status,
            unreachable: AWAY.includes(answer.status),
        });
    return value;
}

// Copies the text of `node`; the button that asked for it, which reads Copy, says for a moment what
// came of it.
export async function copyText(button, node) {
    let copied = true;
    try {
        await navigator.clipboard.writeText(node.textContent);
    } catch {
        // only pages of this machine, or by https, may write to the clipboard themselves
        getSelection().selectAllChildren(node);
        copied = document.execCommand("copy");
    }
    button.textContent = copied ? "Copied" : "Not allowed here";
    setTimeout(() => {
        button.textContent = "Copy";
    }, COPIED_SHOWN);
}
