// A libcuda.so.1 that does nothing: what is left of a launch is the host's work.
#include <cstdint>

namespace {
int context, module, function;

int attribute(int which) {
  switch (which) {
    case 10: return 32;      // threads of a warp
    case 16: return 132;     // multiprocessors
    case 75: return 9;       // compute capability
    case 76: return 0;
    case 82: return 65536;
    case 97: return 232448;  // shared memory of a block that asks for more
    default: return 1000000;
  }
}
}  // namespace

extern "C" {
int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* found) { return *found = 13000, 0; }
int cuGetErrorString(int, const char** text) { return *text = "stub", 0; }
int cuDeviceGet(int* device, int index) { return *device = index, 0; }
int cuDeviceGetAttribute(int* found, int which, int) { return *found = attribute(which), 0; }
int cuDevicePrimaryCtxRetain(void** found, int) { return *found = &context, 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxGetDevice(int* device) { return *device = 0, 0; }
int cuCtxGetCurrent(void** found) { return *found = &context, 0; }
int cuCtxSetLimit(int, unsigned long) { return 0; }
int cuCtxGetLimit(unsigned long* found, int) { return *found = 0, 0; }
int cuFuncGetAttribute(int* found, int which, void*) { return *found = which == 0 ? 1024 : 0, 0; }
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuFuncSetCacheConfig(void*, int) { return 0; }
int cuModuleLoadData(void** found, const void*) { return *found = &module, 0; }
int cuModuleUnload(void*) { return 0; }
int cuModuleGetFunction(void** found, void*, const char*) { return *found = &function, 0; }
int cuTensorMapEncodeTiled(void*, ...) { return 0; }
int cuTensorMapEncodeIm2col(void*, ...) { return 0; }
int cuOccupancyMaxActiveClusters(int* found, void*, void*) { return *found = 1, 0; }
int cuPointerGetAttribute(void* found, int, std::uint64_t address) { return *(std::uint64_t*)found = address, 0; }
int cuPointerGetAttributes(unsigned, void*, void**, std::uint64_t) { return 0; }
int cuStreamIsCapturing(void*, int* found) { return *found = 0, 0; }
int cuLaunchKernelEx(const void*, void*, void**, void**) { return 0; }
}
