// Starts using the places that Gradio has created.

import { JobStrip } from "../../shared/jobs.js";
import { Chat } from "../chat/chat.js";
import { Hardware } from "../hardware/hardware.js";
import { DataFiles } from "../new/data_files.js";
import { fill, leadToMachines, mountTrain } from "../new/train.js";
import { RunPage } from "../run/run_page.js";
import { Timeline } from "../run/timeline.js";
import { RunList } from "../runs/runs.js";
import { Account } from "./account.js";
import { NotifySwitch } from "./notify.js";
import { closeRun, draw, go, openChat, openRun, setAxis, setStep, stayWithRun } from "./router.js";
import { RunBar } from "./runbar.js";
import { wake } from "./schedule.js";
import { Sidebar } from "./sidebar.js";
import { page, places } from "./state.js";

const mounts = {
    sidebar: (place) => {
        mountTrain(place);
        const wayIn = document.querySelector('meta[name="ramstream-login"]')?.content;
        if (wayIn) new Account(place.element, wayIn === "session");
        places.sidebar = new Sidebar(place.element, go);
        draw();
    },
    run_bar: (place) => {
        places.bar = new RunBar(place, {
            wake,
            go,
            open: () => openRun(page.active),
            opened: openRun,
            stay: stayWithRun,
            attend: () => places.chat?.attend(),
            renamed,
            deleted: (run) => {
                closeRun(run);
                go({ page: "runs" });
            },
        });
        const notify = place.element.querySelector('[data-part="notify"]');
        new NotifySwitch(notify, (text) => places.bar.notify(text, "warn"));
        draw();
        wake();
    },
    run: (place) => {
        const node = place.element.querySelector(".rs-timeline");
        const timeline = new Timeline(node, page.place.step, setStep);
        const edit = () => places.bar?.edit();
        const changed = () => places.sidebar?.changed();
        const calls = { go, setAxis, openChat, wake, edit, changed };
        places.run = new RunPage(place.element, timeline, calls);
        page.seen = 0;
        draw();
        wake();
    },
    hardware: (place) => {
        places.hardware = new Hardware(place.element, () => go({ page: "new" }), fill);
        leadToMachines((model, settings) => {
            go({ page: "hardware" });
            places.hardware.offer(model, settings);
        });
        wake();
    },
    jobs: (place) => {
        new JobStrip(place.element);
    },
    files: (place) => {
        mountTrain(place);
        place.files = new DataFiles(place);
    },
    chat: (place) => {
        places.chat = new Chat(place.element);
        wake();
    },
    runs: (place) => {
        const changed = () => places.sidebar?.changed();
        places.runs = new RunList(place.element, {
            go,
            openRun,
            closeRun,
            openChat,
            changed,
            renamed,
        });
        wake();
    },
    queued: (place) => {
        mountTrain(place);
        const link = place.element.querySelector('[data-part="see-queue"]');
        link.addEventListener("click", () => go({ page: "runs" }));
        place.watch("value", () => places.sidebar?.changed());
    },
};

// A run has another name: every place that shows it reads it again.
function renamed() {
    places.sidebar?.changed();
    places.runs?.renamed();
    wake();
}

// Starts using a place that Gradio has created.
export function mount(place) {
    const mountHere = mounts[place.name] ?? mountTrain;
    mountHere(place);
}
