// Decides how long a newer figure may wait to be drawn because nobody could see the difference:
// with thousands of steps, one more moves a curve by less than a pixel.

const SAME = 2000; // ms that such a figure waits at most
const BEYOND = 5000; // the same, if all new points are beyond the end of a zoom
const UNSEEN = 1 / 200; // this share of the height of a curve is less than a pixel
const CLOSE = 0.01; // so is this share of the value at an end of a logarithmic axis

// drawn, newer: figures as the server made them; shown: the ends of the x axis as numbers; width:
// the width of the axis in pixels. Returns ms, or 0 if the figure must be drawn at once.
export function patience(drawn, newer, shown, width) {
    if (drawn.data.length !== newer.data.length) return 0;
    if (JSON.stringify(drawn.layout) !== JSON.stringify(newer.layout)) return 0;
    const [from, to] = shown;
    let waits = BEYOND;
    for (const [index, trace] of newer.data.entries()) {
        const before = drawn.data[index];
        if (!isSameCurve(before, trace)) return 0;
        const was = before.x.at(-1);
        const is = trace.x.at(-1);
        if (was > to && is > to) continue;
        if (Math.abs(is - was) * width >= to - from) return 0;
        waits = SAME;
    }
    return waits;
}

// Whether both are the same curve, at the same height as far as can be seen.
function isSameCurve(before, trace) {
    if (trace.type !== "scatter" || trace.name !== before.name) return false;
    const [low, high] = ends(before.y);
    const [newLow, newHigh] = ends(trace.y);
    const height = high - low;
    return isClose(low, newLow, height) && isClose(high, newHigh, height);
}

function isClose(was, is, height) {
    if (was === is) return true;
    const moved = Math.abs(is - was);
    return moved <= UNSEEN * height && moved <= CLOSE * Math.abs(was);
}

// The minimum and the maximum of a curve, which may have gaps.
export function ends(values) {
    let low = Infinity;
    let high = -Infinity;
    for (const value of values) {
        if (value === null) continue;
        if (value < low) low = value;
        if (value > high) high = value;
    }
    return [low, high];
}
