// Days and times of day, in one format on all pages. All functions take Unix seconds.

// 20:15, or 20:15:03.
export function clockText(seconds, hasSeconds = false) {
    const shown = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
    if (hasSeconds) shown.second = "2-digit";
    return dateOf(seconds).toLocaleTimeString("en", shown);
}

// Nov 29, and the year if it is another one.
export function dayText(seconds) {
    const date = dateOf(seconds);
    const shown = { month: "short", day: "numeric" };
    if (date.getFullYear() !== new Date().getFullYear()) shown.year = "numeric";
    return date.toLocaleDateString("en", shown);
}

// Nov 29, 20:15.
export function momentText(seconds, hasSeconds = false) {
    return `${dayText(seconds)}, ${clockText(seconds, hasSeconds)}`;
}

export function isToday(seconds) {
    return dateOf(seconds).toDateString() === new Date().toDateString();
}

const dateOf = (seconds) => new Date(1000 * seconds);
