"""Navigation and the frame that every page shares: `streamlit run app/streamlit_app.py`."""

from __future__ import annotations

import streamlit as st

from app.components.compare_tray import show_compare_button
from app.components.header import show_header
from app.components.link import link_once, tell_refused
from app.components.problems import told_in_one_sentence
from app.predictions import begin_at_full_speed

SIDEBAR_WIDTH_PX = 370

st.set_page_config(
    page_title="Peakmark",
    page_icon=":material/memory:",
    layout="wide",
    initial_sidebar_state=SIDEBAR_WIDTH_PX,
)
page = st.navigation(
    {
        "Plan": [
            st.Page(
                "app_pages/plan.py",
                title="Plan",
                icon=":material/straighten:",
                default=True,
                help="Does it fit, how close, how fast, and what would change that?",
            ),
            st.Page(
                "app_pages/ledger.py",
                title="Ledger",
                icon=":material/view_quilt:",
                help="Which tensor is that, why is this the peak, and when in the step?",
            ),
            st.Page(
                "app_pages/sweep.py",
                title="Sweep",
                icon=":material/grid_view:",
                help="Of everything I left open, what should I run?",
            ),
            st.Page(
                "app_pages/compare.py",
                title="Compare",
                icon=":material/compare_arrows:",
                help="What is the difference between these plans, and what causes it?",
            ),
        ],
        "Understand": [
            st.Page(
                "app_pages/zero.py",
                title="ZeRO",
                icon=":material/stacks:",
                help="What does each stage and engine hold, send and cost, and when is ZeRO not "
                "the answer?",
            ),
            st.Page(
                "app_pages/attention.py",
                title="Attention",
                icon=":material/center_focus_strong:",
                help="What do kernels and algorithms of attention cost here, and which are exact?",
            ),
            st.Page(
                "app_pages/serving.py",
                title="Serving",
                icon=":material/dns:",
                help="How many requests, how soon the first token, how fast the rest, which lever "
                "helps?",
            ),
            st.Page(
                "app_pages/claims.py",
                title="Claims",
                icon=":material/fact_check:",
                help="Is what people say about FlashAttention and ZeRO true here?",
            ),
        ],
        "Prove": [
            st.Page(
                "app_pages/runs.py",
                title="Runs",
                icon=":material/list_alt:",
                help="What ran, what was predicted and what was measured.",
            ),
            st.Page(
                "app_pages/run.py",
                title="Run",
                icon=":material/timeline:",
                visibility="hidden",
                help="One run: history, log, prediction beside measurement, environment.",
            ),
            st.Page(
                "app_pages/experiments.py",
                title="Experiments",
                icon=":material/science:",
                help="Which variable changed, algorithm or system, and is the difference real?",
            ),
            st.Page(
                "app_pages/accuracy.py",
                title="Accuracy",
                icon=":material/target:",
                help="How far predictions have been from what was measured.",
            ),
            st.Page(
                "app_pages/hardware.py",
                title="Hardware",
                icon=":material/developer_board:",
                help="The attached GPUs and the presets with their sources.",
            ),
        ],
    },
    position="top",
)
begin_at_full_speed()
header = st.container()
link = link_once()
notices = st.container()
with told_in_one_sentence():
    page.run()
with header, told_in_one_sentence():
    show_header(page.title, show_compare_button)
with notices:
    tell_refused(link)
