// One CUDA device that PyTorch can name and cannot compute on. Autograd asks a backend for its devices and
// streams before it runs a backward pass over fake tensors on cuda:0; here both are constants, and nothing is
// allocated, queued or waited for.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device only_device(c10::DeviceType::CUDA, 0);

c10::Stream only_stream() {
  return c10::Stream(c10::Stream::DEFAULT, only_device);
}

struct OnlyDeviceGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return only_device; }
  c10::Device exchangeDevice(c10::Device) const override { return only_device; }
  c10::Stream getStream(c10::Device) const noexcept override { return only_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return only_stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return only_stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

struct OnlyDeviceHooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

std::unique_ptr<at::CUDAHooksInterface> only_device_hooks(at::CUDAHooksArgs) {
  return std::make_unique<OnlyDeviceHooks>();
}

// Preferred to the hooks of a CUDA build, whichever are registered first.
[[maybe_unused]] const bool registered = [] {
  at::CUDAHooksRegistry()->Register("CUDAHooks", only_device_hooks, c10::REGISTRY_PREFERRED);
  return true;
}();

}  // namespace

// Returns 1 if PyTorch uses these hooks, 0 if it asked for hooks before they were here.
extern "C" int evenpack_install_fake_cuda() {
  static OnlyDeviceGuard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
  return at::detail::getCUDAHooks().hasCUDA() ? 1 : 0;
}
