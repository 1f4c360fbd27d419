//! The engine as Python's `metal_attention._engine`: token ids in, tokens out. What programs see of it is written in Python
//! (`python/metal_attention`).
//!
//! Whatever takes time runs with Python detached, so that other threads go on; who waits looks for signals such as Ctrl-C
//! now and then ([`wait`]).

mod conversation;
mod engine;
mod errors;
mod grammar;
mod load;
mod params;
mod processor;
mod text;
mod wait;

use pyo3::prelude::*;

#[pymodule(gil_used = false)]
fn _engine(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<engine::Engine>()?;
    module.add_class::<conversation::PyConversation>()?;
    module.add_class::<grammar::PyGrammar>()?;
    module.add_class::<text::Completion>()?;
    module.add_class::<text::Event>()?;
    module.add_class::<text::EventStream>()
}
