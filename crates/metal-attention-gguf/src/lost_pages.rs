//! Mapped files that are truncated while they are in use.
//!
//! Reading a page of a mapping that is no longer in the file raises `SIGBUS`, which ends the process without a message. A
//! program can install a handler that reports the file: [`exit_on_lost_pages`]. All mappings are registered for it in a list.

#[cfg(unix)]
pub(crate) use unix::MappedFileGuard;

/// Installs a handler of `SIGBUS` for the process. When a page of a mapped model file cannot be read because the file was
/// truncated, the process ends with `exit_code` and a message on stderr, which names the file and ends with `advice`.
///
/// A program has to request this, because the handler is global. Signals with other causes are passed to the previous handler.
/// On systems other than Unix this does nothing: Windows does not allow truncating a mapped file. Only the first call has an
/// effect.
pub fn exit_on_lost_pages(exit_code: i32, advice: &'static str) {
    #[cfg(unix)]
    unix::install_handler(exit_code, advice);
    #[cfg(not(unix))]
    let _ = (exit_code, advice);
}

#[cfg(unix)]
mod unix {
    use std::path::Path;
    use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
    use std::sync::{Mutex, OnceLock, PoisonError};
    use std::{mem, ptr};

    /// An entry of the list of files that are or were mapped. Entries are never freed, because the handler may read them at any
    /// time; the entry of a file that is no longer mapped is used again for the same file.
    #[derive(Debug)]
    struct MappedFile {
        /// The address of the mapping.
        start: AtomicUsize,
        /// Bytes of the mapping; 0: not mapped.
        len: AtomicUsize,
        /// The file's name in quotes.
        name: String,
        /// The next older entry.
        next: Option<&'static MappedFile>,
    }

    /// The newest entry, the head of the list.
    static NEWEST: AtomicPtr<MappedFile> = AtomicPtr::new(ptr::null_mut());
    /// Locked while an entry is added or reused; the handler locks nothing.
    static ADDING: Mutex<()> = Mutex::new(());

    /// The newest entry.
    fn newest() -> Option<&'static MappedFile> {
        // SAFETY: the pointer is null or that of a leaked entry, which is complete when the pointer is stored.
        unsafe { NEWEST.load(Ordering::Acquire).as_ref() }
    }

    /// All entries, the newest first.
    fn entries() -> impl Iterator<Item = &'static MappedFile> {
        std::iter::successors(newest(), |entry| entry.next)
    }

    /// The registration of a mapping. It must be dropped before the mapping.
    #[derive(Debug)]
    pub(crate) struct MappedFileGuard(&'static MappedFile);

    impl MappedFileGuard {
        /// Registers `bytes` as the mapping of the file at `path`.
        pub(crate) fn new(path: &Path, bytes: &[u8]) -> Self {
            let name = format!("{:?}", path.to_string_lossy());
            let _adding = ADDING.lock().unwrap_or_else(PoisonError::into_inner);
            let unused = entries().find(|e| e.len.load(Ordering::Acquire) == 0 && e.name == name);
            let entry = unused.unwrap_or_else(|| {
                let (start, len) = (AtomicUsize::new(0), AtomicUsize::new(0));
                let entry = Box::leak(Box::new(MappedFile { start, len, name, next: newest() }));
                NEWEST.store(entry, Ordering::Release);
                entry
            });
            entry.start.store(bytes.as_ptr().addr(), Ordering::Relaxed);
            entry.len.store(bytes.len(), Ordering::Release);
            Self(entry)
        }
    }

    impl Drop for MappedFileGuard {
        fn drop(&mut self) {
            self.0.len.store(0, Ordering::Release);
        }
    }

    /// The parameters of the installed handler.
    struct SignalHandling {
        exit_code: i32,
        advice: &'static str,
        /// The previous handler.
        before: libc::sigaction,
    }

    static HANDLING: OnceLock<SignalHandling> = OnceLock::new();

    /// Installs the handler; see [`exit_on_lost_pages`](super::exit_on_lost_pages).
    pub(super) fn install_handler(exit_code: i32, advice: &'static str) {
        // SAFETY: both calls get valid pointers, and all zeros is a valid `sigaction`. The handler is async-signal-safe: it
        // reads atomics and constants, and calls `write`, `_exit`, `sigaction` and `raise` only.
        unsafe {
            let mut before: libc::sigaction = mem::zeroed();
            if libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut before) != 0 {
                return;
            }
            // Set before the handler is installed, because it reads this.
            if HANDLING.set(SignalHandling { exit_code, advice, before }).is_err() {
                return;
            }
            let mut action: libc::sigaction = mem::zeroed();
            action.sa_sigaction = on_sigbus as *const () as usize;
            // On the signal stack, like the handler of stack overflows, to which the signal may be passed.
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&raw mut action.sa_mask);
            libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut());
        }
    }

    /// The handler: ends the process where the address lies in a registered mapping, otherwise restores the previous handler
    /// and raises the signal again.
    extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        let Some(handling) = HANDLING.get() else { return };
        // SAFETY: the system passes a valid `siginfo_t`, whose union contains an address for this signal.
        let address = unsafe { (*info).si_addr() }.addr();
        let contains_address = |entry: &&MappedFile| {
            let len = entry.len.load(Ordering::Acquire);
            address.wrapping_sub(entry.start.load(Ordering::Relaxed)) < len
        };
        if let Some(entry) = entries().find(contains_address) {
            let was = " was changed or cut short while it was in use";
            for part in ["\nerror: the model file ", &entry.name, was, handling.advice, "\n"] {
                // SAFETY: the bytes are valid. An error of `write` is ignored: there is no other way to report.
                unsafe { libc::write(libc::STDERR_FILENO, part.as_ptr().cast(), part.len()) };
            }
            // SAFETY: `_exit` may be called in a signal handler.
            unsafe { libc::_exit(handling.exit_code) };
        }
        // SAFETY: the action was returned by the system. The raised signal is delivered when this handler has returned.
        unsafe {
            libc::sigaction(signal, &raw const handling.before, ptr::null_mut());
            libc::raise(signal);
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        /// Address and length of the entries whose names contain `name`.
        fn named(name: &str) -> Vec<(usize, usize)> {
            let range = |e: &MappedFile| (e.start.load(Ordering::Relaxed), e.len.load(Ordering::Relaxed));
            entries().filter(|e| e.name.contains(name)).map(range).collect()
        }

        #[test]
        fn a_file_that_is_mapped_again_reuses_its_entry() {
            let path = Path::new("/tmp/lost-pages-\u{202e}test.gguf");
            let bytes = [[0u8; 16], [1; 16]];
            let range = |bytes: &[u8]| (bytes.as_ptr().addr(), bytes.len());
            for _ in 0..3 {
                let watched = MappedFileGuard::new(path, &bytes[0]);
                assert_eq!(named("lost-pages"), [range(&bytes[0])]);
                drop(watched);
                assert_eq!(named("lost-pages")[0].1, 0);
            }
            let both = bytes.each_ref().map(|bytes| MappedFileGuard::new(path, bytes));
            assert_eq!(named("lost-pages"), [range(&bytes[1]), range(&bytes[0])]);
            drop(both);
            assert_eq!(named(r"lost-pages-\u{202e}test").len(), 2);
        }
    }
}
