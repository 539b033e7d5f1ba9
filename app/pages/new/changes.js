// Changes settings of the form from a script. Gradio does that, since it owns the form.

let listener = () => {};

// given: is called as soon as settings are changed so.
export function whenGiven(given) {
    listener = given;
}

// `place` is one of Gradio's, whose event `input` the form takes changes from. Gradio handles the
// event later, when an answer may have replaced the place's value, so changes wait outside of it.
export function give(place, changes) {
    window.ramstreamChanges = { ...window.ramstreamChanges, ...changes };
    listener();
    place.trigger("input");
}
