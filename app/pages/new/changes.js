// Changes settings of the form from a script. Gradio does that, since it owns the form.

// `place` is one of Gradio's, whose event `input` the form takes changes from. Gradio handles the
// event later, when an answer may have replaced the place's value, so changes wait outside of it.
export function give(place, changes) {
    window.ramstreamChanges = { ...window.ramstreamChanges, ...changes };
    place.trigger("input");
}
