//! The Python module `metal_attention._engine`: token ids in, tokens out. The public package is written in Python
//! (`python/metal_attention`) and wraps it.
//!
//! Everything that takes time runs with Python detached, so that other threads continue; a thread that waits checks for signals
//! such as Ctrl-C regularly ([`wait`]).

mod conversation;
mod engine;
mod errors;
mod grammar;
mod load;
mod params;
mod picture;
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
    module.add_class::<picture::PyPicture>()?;
    module.add_class::<picture::PySpans>()?;
    module.add_class::<text::Completion>()?;
    module.add_class::<text::Event>()?;
    module.add_class::<text::EventStream>()
}
