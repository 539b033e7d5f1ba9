// Names this tab, and asks for what its form begins with while the browser loads Gradio, which
// takes much longer than the answer.
//
// This is no module: those run after Gradio's files have come.

{
    const NAME = "ramstream-tab"; // a reload keeps the name, under which the server keeps a draft
    const IS_OPEN = "ramstream-tab-is-open";

    // A browser may keep nothing for a page; its tab then has another name after a reload.
    const kept = (act) => {
        try {
            return act(sessionStorage);
        } catch {
            return null;
        }
    };

    // What a browser keeps for a tab is copied into one that is opened from it, or duplicates it.
    // The first one is still open then, so the copy takes a name of its own.
    const named = () => {
        const known = kept((storage) => storage.getItem(NAME));
        const isCopy = kept((storage) => storage.getItem(IS_OPEN)) !== null;
        if (known && !isCopy) return { tab: known, other: "" };
        const given = crypto.getRandomValues(new Uint32Array(3));
        const tab = [...given].map((part) => part.toString(36)).join("-");
        return { tab, other: known ?? "" };
    };

    const names = named();
    const open = () =>
        kept((storage) => {
            storage.setItem(NAME, names.tab);
            storage.setItem(IS_OPEN, "");
        });
    open();
    window.addEventListener("pageshow", open); // also of a page that the browser had put aside
    window.addEventListener("pagehide", () => kept((storage) => storage.removeItem(IS_OPEN)));

    const ask = async () => {
        const headers = { "content-type": "application/json" };
        const body = JSON.stringify(names);
        const answer = await fetch("/api/opening", { method: "POST", headers, body });
        const found = await answer.json();
        return answer.ok ? found : { about: found.error };
    };
    window.ramstreamTab = names.tab;
    // For Gradio, which fills the form. Without an answer the form stays as it is laid out.
    window.ramstreamOpening = ask().catch(() => ({ about: "The server does not answer." }));
}
