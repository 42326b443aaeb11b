// Keeps the demangler of C++ names, a fifth of the compressed file, out of an extension that links the C++
// library statically, as wheels of Linux do. The definition is visible in the extension alone.
#include <cstddef>

// Names stay mangled then: nanobind shows them in errors about types that were never bound.
extern "C" char* __cxa_demangle(const char*, char*, std::size_t*, int* status) {
    if (status != nullptr) *status = -2;  // not a valid name
    return nullptr;
}
