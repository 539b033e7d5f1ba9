// Who is logged in: the header's buttons to log out and to see all sessions, and to end others.
// They are for everyone who has a session. The owner of a server without a password has none, and
// sees the list while others have one.

import { el, field, send, setText } from "../../shared/dom.js";
import { momentText } from "../../shared/moments.js";
import { inTime } from "./connection.js";

const LOGIN = "/login";
const JUST_NOW = 60; // seconds

export class Account {
    constructor(header, hasSession) {
        const root = header.querySelector('[data-part="account"]');
        const part = (name) => root.querySelector(`[data-part="${name}"]`);
        this.dialog = part("sessions-list");
        this.list = part("list");
        this.others = part("others");
        this.problem = field(root, "problem");
        this.accountProblem = field(root, "account-problem");
        this.user = field(root, "user");
        part("logout").hidden = !hasSession;
        part("logout").addEventListener("click", () => this.logOut());
        part("sessions").addEventListener("click", () => this.open());
        part("close").addEventListener("click", () => this.dialog.close());
        this.others.addEventListener("click", () => this.ask("end_others", {}));
        root.hidden = false;
    }

    async logOut() {
        setText(this.accountProblem, "");
        try {
            await send("/api/sessions/logout", {});
        } catch (error) {
            // A session that is over already needs no logging out.
            if (error.status !== 401) {
                setText(this.accountProblem, error.message);
                return;
            }
        }
        // This page is not kept in the history, where the back button would find it.
        location.replace(LOGIN);
    }

    open() {
        this.list.replaceChildren();
        this.others.hidden = true;
        this.dialog.showModal();
        this.ask("", undefined);
    }

    // Reads the sessions, or asks the server for a change of them first.
    async ask(what, body) {
        setText(this.problem, "");
        try {
            this.show(await send(`/api/sessions${what && `/${what}`}`, body));
        } catch (error) {
            setText(this.problem, error.status === 401 ? "You are logged out." : error.message);
        }
    }

    show({ user, now, fault, sessions }) {
        setText(this.user, user);
        setText(this.problem, fault);
        const hadFocus = this.dialog.contains(document.activeElement);
        this.list.replaceChildren(...sessions.map((session) => this.row(session, now)));
        this.others.hidden = sessions.every((session) => session.is_own);
        // The button that was pressed is gone.
        if (hadFocus && !this.dialog.contains(document.activeElement))
            this.dialog.querySelector('[data-part="close"]').focus();
    }

    row({ name, began, seen, address, browser, is_own: isOwn }, now) {
        const seenFor = now - seen;
        const lastSeen = seenFor < JUST_NOW ? "seen just now" : `seen ${ago(seenFor)}`;
        const caption = [address, `logged in ${momentText(began)}`, lastSeen].filter(Boolean);
        const label = `End the session of ${browser}, ${caption.join(", ")}`;
        const end = el(
            "button",
            { type: "button", "aria-label": label, click: () => this.ask("end", { name }) },
            "End",
        );
        return el(
            "li",
            {},
            el(
                "div",
                {},
                el("strong", {}, browser),
                isOwn ? el("span", { class: "rs-state", "data-tone": "good" }, "This browser") : "",
                el("small", {}, caption.join(" · ")),
            ),
            isOwn ? "" : end,
        );
    }
}

const ago = (seconds) => {
    const days = Math.floor(seconds / 86400);
    if (days > 1) return `${days} days ago`;
    return `${inTime(1000 * seconds)} ago`;
};
