//! What callers hand over: pointers that may be null, lengths that may be anything.

use std::ffi::{CStr, c_char};
use std::ptr::NonNull;

use crate::MA_NUL_TERMINATED;
use crate::status::{Failure, Status, call};

/// What `pointer` leads to; an error where it is null.
///
/// # Safety
/// A pointer that is not null leads to a `T` that stays as it is for `'a`.
pub unsafe fn reference<'a, T>(pointer: *const T, name: &str) -> Result<&'a T, Failure> {
    // SAFETY: the caller says so.
    unsafe { pointer.as_ref() }.ok_or_else(|| Failure::argument(format!("{name} is a null pointer")))
}

/// A place of the caller's to write a `T` to, which need not hold one yet.
pub struct Out<T>(NonNull<T>);

impl<T> Out<T> {
    /// # Safety
    /// A pointer that is not null leads to room for a `T` that nobody else uses while this exists.
    pub unsafe fn new(pointer: *mut T, name: &str) -> Result<Self, Failure> {
        NonNull::new(pointer).map(Self).ok_or_else(|| Failure::argument(format!("{name} is a null pointer")))
    }

    pub fn set(&self, value: T) {
        // SAFETY: there is room for it, as `new` was promised. What was there, if anything, is plain data.
        unsafe { self.0.write(value) }
    }
}

/// Drops what [`Box::into_raw`] gave. Null is nothing to drop.
///
/// # Safety
/// A pointer that is not null comes from `Box::into_raw`, and nothing uses it after this.
pub unsafe fn free<T>(pointer: *mut T) {
    if !pointer.is_null() {
        // SAFETY: it is a box's, as the caller says.
        let value = unsafe { Box::from_raw(pointer) };
        call(|| {
            drop(value);
            Ok(())
        });
    }
}

/// The `n` values from `pointer` on. Where there are none the pointer may be null.
///
/// # Safety
/// A pointer that is not null leads to `n` values that stay as they are for `'a`.
pub unsafe fn values<'a, T>(pointer: *const T, n: usize, name: &str) -> Result<&'a [T], Failure> {
    if n == 0 {
        return Ok(&[]);
    }
    check_size::<T>(n, name)?;
    if pointer.is_null() {
        return Err(Failure::argument(format!("{name} is a null pointer, and there should be {n} of them")));
    }
    // SAFETY: it is not null, and no longer than memory is; the rest the caller says.
    Ok(unsafe { std::slice::from_raw_parts(pointer, n) })
}

/// A list of `n` values cannot be longer than memory is.
fn check_size<T>(n: usize, name: &str) -> Result<(), Failure> {
    match n.checked_mul(size_of::<T>()).filter(|&bytes| isize::try_from(bytes).is_ok()) {
        Some(_) => Ok(()),
        None => Err(Failure::argument(format!("{name} cannot have {n} elements"))),
    }
}

/// The text of `length` bytes, or up to its NUL where that is [`MA_NUL_TERMINATED`].
///
/// # Safety
/// A pointer that is not null leads to so many bytes, or to a NUL at last, that stay as they are for `'a`.
pub unsafe fn text<'a>(pointer: *const c_char, length: usize, name: &str) -> Result<&'a str, Failure> {
    let bytes = if length == MA_NUL_TERMINATED {
        if pointer.is_null() {
            return Err(Failure::argument(format!("{name} is a null pointer")));
        }
        // SAFETY: it is not null, and a NUL follows, as the caller says.
        unsafe { CStr::from_ptr(pointer) }.to_bytes()
    } else {
        // SAFETY: the caller says so.
        unsafe { values(pointer.cast(), length, name) }?
    };
    std::str::from_utf8(bytes).map_err(|error| Failure::argument(format!("{name} is no UTF-8: {error}")))
}

/// The `n` strings from `pointer` on, each of which ends with a NUL.
///
/// # Safety
/// A pointer that is not null leads to `n` pointers, each of which is null or leads to a NUL at last.
pub unsafe fn texts(pointer: *const *const c_char, n: usize, name: &str) -> Result<Vec<String>, Failure> {
    // SAFETY: there are `n`, as the caller says.
    let pointers = unsafe { values(pointer, n, name) }?;
    // SAFETY: each ends with a NUL, as the caller says.
    let owned = |&each: &*const c_char| Ok(unsafe { text(each, MA_NUL_TERMINATED, name) }?.to_owned());
    pointers.iter().map(owned).collect()
}

/// Writes `from` to the `capacity` values from `to` on, and how many there are to `n`. An error where there are more.
///
/// # Safety
/// `to` is null, or leads to room for `capacity` values that nobody else uses now.
pub unsafe fn fill<T: Copy>(from: &[T], to: *mut T, capacity: usize, n: &Out<usize>) -> Result<(), Failure> {
    n.set(from.len());
    if from.len() > capacity || to.is_null() && !from.is_empty() {
        let message = format!("there are {}, and there is room for {capacity}", from.len());
        return Err(Failure::new(Status::BufferTooSmall, message));
    }
    if !from.is_empty() {
        // SAFETY: there is room, as the caller says; and `from` is memory of this library's.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
    }
    Ok(())
}

/// A struct of options whose first member is its size: `None` where the pointer is null.
///
/// # Safety
/// A pointer that is not null leads to a size, and where that is the size of a `T` to a `T`, for `'a`.
pub unsafe fn options<'a, T>(pointer: *const T, name: &str) -> Result<Option<&'a T>, Failure> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: a size comes first, as the caller says.
    let size = unsafe { pointer.cast::<usize>().read() };
    check_struct::<T>(size, name)?;
    // SAFETY: it is a `T`, by its size.
    Ok(Some(unsafe { &*pointer }))
}

/// Whether a caller's struct has the size that it has here.
pub fn check_struct<T>(size: usize, name: &str) -> Result<(), Failure> {
    if size == size_of::<T>() {
        return Ok(());
    }
    let expected = size_of::<T>();
    Err(Failure::argument(format!(
        "{name} has {size} bytes instead of {expected}: ma_{name}_default sets them, and program and library must be of one \
         version"
    )))
}
