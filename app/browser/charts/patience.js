// How long a newer figure may wait to be drawn since nobody could see the difference: with
// thousands of steps, one more moves a curve by less than a pixel.

const SAME = 2000; // ms at most that such a figure waits
const BEYOND = 5000; // where all that is new lies beyond the end of a zoom
const UNSEEN = 1 / 200;
const CLOSE = 0.01; // of the height of a curve, and of its ends on a logarithmic axis: less than a pixel

// `drawn`, `newer`: figures as the server made them; `shown`: the ends of the x axis as numbers;
// `width`: its pixels.
export function patience(drawn, newer, shown, width) {
    if (
        drawn.data.length !== newer.data.length ||
        JSON.stringify(drawn.layout) !== JSON.stringify(newer.layout)
    )
        return 0;
    const [from, to] = shown;
    let waits = BEYOND;
    for (const [index, trace] of newer.data.entries()) {
        const before = drawn.data[index];
        if (
            trace.type !== "scatter" ||
            trace.name !== before.name ||
            !areAlike(ends(before.y), ends(trace.y))
        )
            return 0;
        const [was, is] = [before, trace].map(({ x }) => x.at(-1));
        if (was > to && is > to) continue;
        if (Math.abs(is - was) * width >= to - from) return 0;
        waits = SAME;
    }
    return waits;
}

function ends(values) {
    let low = Infinity;
    let high = -Infinity;
    for (const value of values) {
        if (value === null) continue;
        if (value < low) low = value;
        if (value > high) high = value;
    }
    return [low, high];
}

function areAlike([low, high], [newLow, newHigh]) {
    const height = high - low;
    return [
        [low, newLow],
        [high, newHigh],
    ].every(
        ([was, is]) =>
            was === is ||
            (Math.abs(is - was) <= UNSEEN * height && Math.abs(is - was) <= CLOSE * Math.abs(was)),
    );
}
