// Sizes in words.

const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB"];

// A number of bytes with its unit, as in 1.5 GiB or 312 bytes.
export function inBytes(count) {
    let place = 0;
    let left = count;
    while (left >= 1024 && place < UNITS.length - 1) {
        left /= 1024;
        place += 1;
    }
    return `${place && left < 100 ? left.toFixed(1) : Math.round(left)} ${UNITS[place]}`;
}
