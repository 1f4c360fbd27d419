//! Mapped files that are cut short while they are in use.
//!
//! A page of a mapping that is no longer in the file cannot be read: the system sends the thread that tries `SIGBUS`, which
//! ends the process without a word. A program can say what happened instead: [`exit_on_lost_pages`].

#[cfg(unix)]
pub(crate) use unix::MappedFileGuard;

/// From now on the process ends with `exit_code` and a message on stderr where a mapped model file turns out to have been
/// cut short while it is in use. The message names the file and ends with `advice`.
///
/// This is for programs, which a library should not decide for: it handles the signal `SIGBUS`. Other causes of that
/// signal go to the handler that was there before. Elsewhere than on Unix nothing happens: Windows does not let a mapped
/// file be cut short. The first call counts.
pub fn exit_on_lost_pages(exit_code: i32, advice: &'static str) {
    #[cfg(unix)]
    unix::handle(exit_code, advice);
    #[cfg(not(unix))]
    let _ = (exit_code, advice);
}

#[cfg(unix)]
mod unix {
    use std::path::Path;
    use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
    use std::sync::{Mutex, OnceLock, PoisonError};
    use std::{mem, ptr};

    /// A file that is or was mapped. Entries stay for as long as the process lives, as the handler may look at them at any
    /// time; one whose mapping is gone is used again for the same file.
    #[derive(Debug)]
    struct MappedFile {
        start: AtomicUsize,
        /// 0: not mapped.
        len: AtomicUsize,
        /// The file's name in quotes.
        name: String,
        next: Option<&'static MappedFile>,
    }

    /// The newest entry.
    static NEWEST: AtomicPtr<MappedFile> = AtomicPtr::new(ptr::null_mut());
    /// Held by whoever adds entries; the handler takes no locks.
    static ADDING: Mutex<()> = Mutex::new(());

    fn newest() -> Option<&'static MappedFile> {
        // SAFETY: the pointer is null or that of an entry that was leaked, and entries are complete when it is stored.
        unsafe { NEWEST.load(Ordering::Acquire).as_ref() }
    }

    fn entries() -> impl Iterator<Item = &'static MappedFile> {
        std::iter::successors(newest(), |entry| entry.next)
    }

    /// A mapping that the handler knows of. Dropped before the mapping is.
    #[derive(Debug)]
    pub(crate) struct MappedFileGuard(&'static MappedFile);

    impl MappedFileGuard {
        /// Tells the handler that `bytes` are those of the file at `path`.
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

    struct SignalHandling {
        exit_code: i32,
        advice: &'static str,
        /// What handled the signal before.
        before: libc::sigaction,
    }

    static HANDLING: OnceLock<SignalHandling> = OnceLock::new();

    pub(super) fn handle(exit_code: i32, advice: &'static str) {
        // SAFETY: both calls get valid pointers, and all zeros is a valid `sigaction`. The handler is one: it reads atomics
        // and constants, and calls nothing that a signal handler may not call.
        unsafe {
            let mut before: libc::sigaction = mem::zeroed();
            if libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut before) != 0 {
                return;
            }
            // The handler needs what is set here.
            if HANDLING.set(SignalHandling { exit_code, advice, before }).is_err() {
                return;
            }
            let mut action: libc::sigaction = mem::zeroed();
            action.sa_sigaction = on_sigbus as *const () as usize;
            // On the stack for signals, as the handler of stack overflows that may come after it.
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&raw mut action.sa_mask);
            libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut());
        }
    }

    extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        let Some(handling) = HANDLING.get() else { return };
        // SAFETY: the system hands over a valid `siginfo_t`, whose union has an address for this signal.
        let address = unsafe { (*info).si_addr() }.addr();
        let holds_it = |entry: &&MappedFile| {
            let len = entry.len.load(Ordering::Acquire);
            address.wrapping_sub(entry.start.load(Ordering::Relaxed)) < len
        };
        if let Some(entry) = entries().find(holds_it) {
            let was = " was changed or cut short while it was in use";
            for part in ["\nerror: the model file ", &entry.name, was, handling.advice, "\n"] {
                // SAFETY: the bytes are there. Where stderr is closed there is nobody to tell.
                unsafe { libc::write(libc::STDERR_FILENO, part.as_ptr().cast(), part.len()) };
            }
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(handling.exit_code) };
        }
        // SAFETY: the action is one that the system gave. The signal comes again once this handler has returned.
        unsafe {
            libc::sigaction(signal, &raw const handling.before, ptr::null_mut());
            libc::raise(signal);
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        fn named(name: &str) -> Vec<(usize, usize)> {
            let place = |e: &MappedFile| (e.start.load(Ordering::Relaxed), e.len.load(Ordering::Relaxed));
            entries().filter(|e| e.name.contains(name)).map(place).collect()
        }

        #[test]
        fn a_file_that_is_mapped_again_takes_its_old_entry() {
            let path = Path::new("/tmp/lost-pages-\u{202e}test.gguf");
            let bytes = [[0u8; 16], [1; 16]];
            let place = |bytes: &[u8]| (bytes.as_ptr().addr(), bytes.len());
            for _ in 0..3 {
                let watched = MappedFileGuard::new(path, &bytes[0]);
                assert_eq!(named("lost-pages"), [place(&bytes[0])]);
                drop(watched);
                assert_eq!(named("lost-pages")[0].1, 0);
            }
            let both = bytes.each_ref().map(|bytes| MappedFileGuard::new(path, bytes));
            assert_eq!(named("lost-pages"), [place(&bytes[1]), place(&bytes[0])]);
            drop(both);
            assert_eq!(named(r"lost-pages-\u{202e}test").len(), 2);
        }
    }
}
