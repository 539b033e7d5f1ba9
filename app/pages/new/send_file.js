// Sends one file to the server.

import { send } from "../../shared/dom.js";

const BROKEN = "The upload broke off: the server does not answer. Upload the file again.";

// Returns the upload, as the server stored it. `signal` cancels it; `progress` is called with the
// bytes that were sent. Throws an error whose message is a sentence for the page.
export async function sendFile(file, signal, progress) {
    const asked = { name: file.name, bytes: file.size };
    const { id } = await send("/api/uploads", asked, signal);
    try {
        return await put(`/api/uploads/${id}?name=${encodeURIComponent(file.name)}`, {
            file,
            signal,
            progress,
        });
    } catch (error) {
        if (error.status || signal.aborted) throw error;
        // The server may have refused the rest of the file, which browsers do not report. The same
        // question then says why.
        await send("/api/uploads", asked, signal);
        throw error;
    }
}

// `fetch` does not report how much of a body was sent, so this is an XMLHttpRequest.
function put(address, { file, signal, progress }) {
    return new Promise((resolve, reject) => {
        const request = new XMLHttpRequest();
        const fail = (text, status) => reject(Object.assign(new Error(text), { status }));
        request.upload.addEventListener("progress", ({ loaded }) => progress(loaded));
        request.addEventListener("error", () => fail(BROKEN));
        request.addEventListener("abort", () => fail("cancelled"));
        request.addEventListener("load", () => {
            const { status, response } = request;
            if (status === 200 && response) resolve(response);
            else fail(response?.error ?? `The server answered ${status}.`, status);
        });
        request.open("PUT", address);
        request.responseType = "json";
        request.setRequestHeader("content-type", "application/octet-stream");
        signal.addEventListener("abort", () => request.abort(), { once: true });
        request.send(file);
    });
}
