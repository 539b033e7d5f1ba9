// Places of the form whose boxes Gradio has made and not filled yet. They take no text, since the
// values that arrive would replace it.

const OFTEN = 20; // ms between two looks
const LONGEST = 10000; // ms after which Gradio fills nothing any more

// Lets nobody into `place` until `isFilled`, which is called again and again.
export function waitUntilFilled(place, isFilled) {
    const since = performance.now();
    const look = () => {
        place.inert = !isFilled() && performance.now() - since < LONGEST;
        if (place.inert) setTimeout(look, OFTEN);
    };
    look();
}
