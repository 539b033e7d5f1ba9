"""The look of Gradio's components and of our own: a few colors, in light and in dark."""

from __future__ import annotations

import gradio as gr

LIGHT = {
    "page": "#f4f6f9",
    "card": "#ffffff",
    "field": "#ffffff",
    "line": "#dde2ea",
    "field_line": "#8592a5",
    "text": "#18202c",
    "muted": "#566172",
    "accent": "#1f55c4",
    "accent_hover": "#18459f",
    "accent_text": "#ffffff",
    "button": "#edf0f5",
    "button_hover": "#e1e6ee",
}
DARK = {
    "page": "#0f1319",
    "card": "#171c25",
    "field": "#10151c",
    "line": "#29313d",
    "field_line": "#69778c",
    "text": "#e5e9f0",
    "muted": "#9ba7b8",
    "accent": "#396cd8",
    "accent_hover": "#2f60c9",
    "accent_text": "#ffffff",
    "button": "#242c38",
    "button_hover": "#2f3947",
}

_COLORS = {
    "body_background_fill": "page",
    "body_text_color": "text",
    "body_text_color_subdued": "muted",
    "background_fill_primary": "card",
    "background_fill_secondary": "page",
    "border_color_primary": "line",
    "border_color_accent": "accent",
    "color_accent_soft": "button",
    "block_background_fill": "card",
    "block_border_color": "line",
    "block_info_text_color": "muted",
    "block_label_text_color": "text",
    "block_label_background_fill": "card",
    "block_title_text_color": "text",
    "panel_background_fill": "card",
    "panel_border_color": "line",
    "accordion_text_color": "text",
    "link_text_color": "accent",
    "checkbox_background_color": "field",
    "checkbox_background_color_selected": "accent",
    "checkbox_border_color": "field_line",
    "checkbox_border_color_selected": "accent",
    "checkbox_label_background_fill": "card",
    "checkbox_label_border_color": "line",
    "input_background_fill": "field",
    "input_border_color": "field_line",
    "input_border_color_focus": "accent",
    "input_placeholder_color": "muted",
    "button_primary_background_fill": "accent",
    "button_primary_background_fill_hover": "accent_hover",
    "button_primary_text_color": "accent_text",
    "button_primary_border_color": "accent",
    "button_secondary_background_fill": "button",
    "button_secondary_background_fill_hover": "button_hover",
    "button_secondary_text_color": "text",
    "button_secondary_border_color": "line",
    "loader_color": "accent",
}


def make_theme() -> gr.themes.Base:
    """Returns the theme for Gradio. It uses system fonts only: nothing is fetched from other
    servers.
    """
    fonts = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
    theme = gr.themes.Base(
        text_size=gr.themes.sizes.text_md,
        radius_size=gr.themes.sizes.radius_md,
        spacing_size=gr.themes.sizes.spacing_md,
        font=fonts,
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"],
    )
    colors = {name: LIGHT[color] for name, color in _COLORS.items()}
    colors |= {f"{name}_dark": DARK[color] for name, color in _COLORS.items()}
    return theme.set(
        **colors,
        block_border_width="0px",
        block_border_width_dark="0px",
        block_shadow="none",
        block_shadow_dark="none",
        block_padding="0",
        block_title_text_weight="600",
        layout_gap="14px",
        block_title_text_size="var(--rs-size-label)",
        block_info_text_size="var(--rs-size-hint)",
        input_border_width="1px",
        input_border_width_dark="1px",
        input_text_size="var(--rs-size-value)",
        input_padding="8px 10px",
        button_large_text_weight="600",
        panel_border_width="0px",
        panel_border_width_dark="0px",
    )


def css_variables() -> str:
    """Returns the same colors as `--rs-…` variables for our own style sheets."""
    return f"{_css_rule(':root', LIGHT)}\n{_css_rule('body.dark', DARK)}"


def _css_rule(selector: str, colors: dict[str, str]) -> str:
    variables = [f"--rs-{name.replace('_', '-')}: {value};" for name, value in colors.items()]
    return f"{selector} {{ {' '.join(variables)} }}"
