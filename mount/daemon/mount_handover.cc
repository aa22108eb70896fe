// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/mount_handover.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/strings.h"
#include "core/base/utf8.h"
#include "mount/control/daemon_record.h"
#include "mount/logging.h"
#include "snapshot/receive/descriptor_store.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kPrefix = "mount.";
constexpr std::string_view kDevice = "mount.device";
constexpr std::string_view kState = "mount.state";
constexpr std::string_view kBacking = "mount.backing";
constexpr const char* kOwnFile = "/proc/self/exe";
constexpr int kCheckMilliseconds = 10'000;

Json NamesJson(const std::vector<KnownName>& names) {
  Json list = Json::array();
  for (const KnownName& name : names) {
    list.push_back({static_cast<uint64_t>(name.inode), name.references, Utf8OfBytes(name.path)});
  }
  return list;
}

std::vector<KnownName> NamesOf(const Json& list) {
  std::vector<KnownName> names;
  for (const Json& one : list) {
    names.push_back({InodeNumber{one.at(0).get<uint64_t>()}, one.at(1).get<uint64_t>(),
                     BytesOfUtf8(one.at(2).get_ref<const std::string&>())});
  }
  return names;
}

Json FileJson(const KnownFile& file) {
  return {static_cast<uint64_t>(file.handle),
          static_cast<uint64_t>(file.inode),
          file.size,
          file.streamed,
          file.backing ? Json(*file.backing) : Json(),
          file.text ? Json(Utf8OfBytes(*file.text)) : Json()};
}

KnownFile FileOf(const Json& one, size_t backings) {
  KnownFile file;
  file.handle = FileHandle{one.at(0).get<uint64_t>()};
  file.inode = InodeNumber{one.at(1).get<uint64_t>()};
  file.size = one.at(2).get<uint64_t>();
  file.streamed = one.at(3).get<uint64_t>();
  if (!one.at(4).is_null()) file.backing = one.at(4).get<size_t>();
  if (file.backing && *file.backing >= backings) throw std::out_of_range("a backing's place");
  if (!one.at(5).is_null()) file.text = BytesOfUtf8(one.at(5).get_ref<const std::string&>());
  return file;
}

Json KernelJson(const Handover& kernel) {
  Json backings = Json::array(), files = Json::array();
  for (const KnownBacking& one : kernel.backings) backings.push_back(static_cast<int>(one.mode));
  for (const KnownFile& one : kernel.files) files.push_back(FileJson(one));
  Json json = {{"names", NamesJson(kernel.names)},
               {"backings", std::move(backings)},
               {"files", std::move(files)},
               {"next_handle", kernel.next_handle}};
  if (kernel.shown) {
    json["shown"] = {Utf8OfBytes(kernel.shown->run), Utf8OfBytes(kernel.shown->id)};
  }
  return json;
}

Handover KernelOf(const Json& json) {
  Handover kernel;
  kernel.names = NamesOf(json.at("names"));
  for (const Json& mode : json.at("backings")) {
    const int number = mode.get<int>();
    if (number < 0 || number >= static_cast<int>(kServingModes)) throw std::out_of_range("a mode");
    kernel.backings.push_back({static_cast<ServingMode>(number), -1});
  }
  for (const Json& one : json.at("files")) {
    kernel.files.push_back(FileOf(one, kernel.backings.size()));
  }
  kernel.next_handle = json.at("next_handle").get<uint64_t>();
  if (const auto shown = json.find("shown"); shown != json.end()) {
    kernel.shown = ShownStep{BytesOfUtf8(shown->at(0).get_ref<const std::string&>()),
                             BytesOfUtf8(shown->at(1).get_ref<const std::string&>())};
  }
  return kernel;
}

Result<Descriptor> StateFile(const MountState& state) {
  Descriptor file(::memfd_create("ckptfs-mount", MFD_CLOEXEC));
  if (!file.valid()) return Fail(ErrnoError(errno, "a memory file"));
  const std::vector<uint8_t> bytes = EncodeMountState(state);
  CKPT_RETURN_IF_ERROR(
      WriteAll(file.get(), 0, std::as_bytes(std::span(bytes)), "the state of the mount"));
  return file;
}

Result<MountState> ReadState(int file) {
  struct stat info {};
  if (::fstat(file, &info) != 0) return Fail(ErrnoError(errno, "the state of the mount"));
  std::vector<uint8_t> bytes(static_cast<size_t>(info.st_size));
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t got =
        ::pread(file, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (got <= 0) return Fail(ErrnoError(got == 0 ? EIO : errno, "the state of the mount"));
    done += static_cast<size_t>(got);
  }
  return DecodeMountState(bytes);
}

std::vector<char*> Pointers(std::vector<std::string>& words) {
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  return pointers;
}

// The descriptors that a successor is to have, under their names.
Result<std::vector<DescriptorStore::Kept>> Legacy(const MountState& state, Descriptor device) {
  std::vector<DescriptorStore::Kept> kept;
  kept.push_back({std::string(kDevice), std::move(device)});
  CKPT_ASSIGN_OR_RETURN(Descriptor file, StateFile(state));
  kept.push_back({std::string(kState), std::move(file)});
  for (const KnownBacking& backing : state.kernel.backings) {
    Descriptor copy(::fcntl(backing.fd, F_DUPFD_CLOEXEC, 0));
    if (!copy.valid()) return Fail(ErrnoError(errno, "the descriptor of an open file"));
    kept.push_back({std::string(kBacking), std::move(copy)});
  }
  return kept;
}

}  // namespace

std::vector<uint8_t> EncodeMountState(const MountState& state) {
  Json ids = Json::array();
  for (const auto& [handle, id] : state.backing_ids) ids.push_back({handle, id});
  return Json::to_cbor({{"version", kMountStateVersion},
                        {"store", Utf8OfBytes(state.store)},
                        {"mountpoint", Utf8OfBytes(state.mountpoint)},
                        {"log", Utf8OfBytes(state.log)},
                        {"program", state.program},
                        {"generation", state.generation},
                        {"process", state.process},
                        {"greeting", Utf8OfBytes(state.greeting)},
                        {"kernel", KernelJson(state.kernel)},
                        {"backing_ids", std::move(ids)}});
}

Result<MountState> DecodeMountState(std::span<const uint8_t> bytes) {
  try {
    const Json json = Json::from_cbor(bytes.begin(), bytes.end());
    if (json.at("version") != kMountStateVersion) {
      return Fail(ErrorCode::kUnsupported, "another version of ckptfs left the mount");
    }
    const auto text = [&](const char* key) {
      return BytesOfUtf8(json.at(key).get_ref<const std::string&>());
    };
    MountState state;
    state.store = text("store");
    state.mountpoint = text("mountpoint");
    state.log = text("log");
    state.program = text("program");
    state.generation = json.at("generation").get<uint64_t>();
    state.process = json.at("process").get<int64_t>();
    state.greeting = text("greeting");
    state.kernel = KernelOf(json.at("kernel"));
    for (const Json& one : json.at("backing_ids")) {
      state.backing_ids[one.at(0).get<uint64_t>()] = one.at(1).get<int>();
    }
    return state;
  } catch (const std::exception& error) {
    return Fail(ErrorCode::kInvalid, StrCat("the state of a mount: ", std::string(error.what())));
  }
}

std::string ThisProgram() {
  struct stat info {};
  if (::stat(kOwnFile, &info) != 0) return "";
  return StrCat(info.st_dev, ":", info.st_ino, ":", info.st_mtim.tv_sec, ".", info.st_mtim.tv_nsec);
}

bool IsMountLeft() { return DescriptorStore::Has(kState); }

Result<std::optional<ServedMount>> TakeServedMount() {
  std::vector<DescriptorStore::Kept> kept = DescriptorStore::Take(kPrefix);
  ServedMount mount;
  Descriptor state;
  std::vector<Descriptor> backings;
  for (DescriptorStore::Kept& one : kept) {
    if (one.name == kDevice) mount.device = std::move(one.descriptor);
    if (one.name == kState) state = std::move(one.descriptor);
    if (one.name == kBacking) backings.push_back(std::move(one.descriptor));
  }
  if (!mount.device.valid() || !state.valid()) return std::nullopt;
  CKPT_ASSIGN_OR_RETURN(mount.state, ReadState(state.get()));
  if (backings.size() != mount.state.kernel.backings.size()) {
    return Fail(ErrorCode::kInvalid, "the state of a mount has other files than were left");
  }
  for (size_t i = 0; i < backings.size(); ++i) {
    mount.state.kernel.backings[i].fd = backings[i].Release();
  }
  return mount;
}

Status CheckSuccessor(const std::string& program) {
  const std::string version = StrCat(kMountStateVersion);
  std::vector<std::string> words = {program, "upgrade", "--accepts", version};
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) return Fail(ErrnoError(errno, "a pipe"));
  const Descriptor told(ends[0]);
  Descriptor tells(ends[1]);
  posix_spawn_file_actions_t quiet;
  posix_spawn_file_actions_init(&quiet);
  for (const int file : {0, 2}) {
    posix_spawn_file_actions_addopen(&quiet, file, "/dev/null", O_RDWR, 0);
  }
  posix_spawn_file_actions_adddup2(&quiet, tells.get(), 1);
  pid_t child = -1;
  const int failed =
      ::posix_spawn(&child, program.c_str(), &quiet, nullptr, Pointers(words).data(), environ);
  posix_spawn_file_actions_destroy(&quiet);
  if (failed != 0) return Fail(ErrnoError(failed, program));
  const Descriptor process = OpenProcess(child);
  const bool ended = process.valid() && EndsWithin(process, kCheckMilliseconds);
  if (!ended) ::kill(child, SIGKILL);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  // Programs that are not ckptfs end with 0, too.
  std::string answer(kAcceptance.size() + 1, '\0');
  const ssize_t size = ::read(told.get(), answer.data(), answer.size());
  answer.resize(size > 0 ? static_cast<size_t>(size) : 0);
  const bool accepts = ended && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  if (accepts && answer == kAcceptance) return {};
  return Fail(Error{ErrorCode::kUnsupported,
                    StrCat(program, " does not take over a mount from this program")}
                  .Needing("`ckptfs umount --lazy` and a new mount do it: docs/use/upgrade.md"));
}

Error BecomeSuccessor(const std::string& program, const std::vector<std::string>& words,
                      const MountState& state, Descriptor device,
                      std::vector<DescriptorStore::Kept> arenas) {
  auto legacy = Legacy(state, std::move(device));
  if (!legacy) return std::move(legacy).error();
  std::move(arenas.begin(), arenas.end(), std::back_inserter(*legacy));
  std::vector<std::string> all = words;
  const std::vector<char*> pointers = Pointers(all);
  sigset_t none;
  sigemptyset(&none);
  pthread_sigmask(SIG_SETMASK, &none, nullptr);
  if (Status left = DescriptorStore::Leave(*legacy); !left) return std::move(left).error();
  ::execv(program.c_str(), pointers.data());
  const int why = errno;
  ::execv(kOwnFile, pointers.data());
  return ErrnoError(why, program);
}

Succession::Succession() : asked_(::eventfd(0, EFD_CLOEXEC)) {}

Status Succession::Ask(const std::string& program) {
  CKPT_RETURN_IF_ERROR(CheckSuccessor(program));
  const MutexLock lock(mutex_);
  program_ = program;
  const uint64_t one = 1;
  if (::write(asked_.get(), &one, sizeof one) == sizeof one) return {};
  return Fail(ErrnoError(errno, "eventfd"));
}

std::string Succession::program() const {
  const MutexLock lock(mutex_);
  return program_;
}

void KeepMount(const MountState& state, const Descriptor& device) {
  const auto manager = DescriptorStore::Find();
  if (!manager) return;
  ForgetMount();  // an earlier program's
  const auto file = StateFile(state);
  if (!file || !manager->Put(kState, file->get()) || !manager->Put(kDevice, device.get())) {
    Log(LogLevel::kWarning, "the service manager does not keep the mount");
  }
}

void ForgetMount() {
  const auto manager = DescriptorStore::Find();
  if (!manager) return;
  manager->Remove(kDevice);
  manager->Remove(kState);
}

}  // namespace ckptfs
