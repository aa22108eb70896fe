// SPDX-License-Identifier: Apache-2.0

#include "core/peer/peer_keys.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>

#include <cerrno>
#include <optional>

#include "core/base/strings.h"
#include "core/records/record_text.h"
#include "core/records/records.h"

namespace ckptfs {
namespace {

constexpr size_t kRandomBytes = 32;
constexpr size_t kProofBytes = 32;  // of SHA-256
constexpr size_t kDigestBytes = 16;

std::string BytesOfDigest(const Digest& digest) {
  std::string bytes;
  for (const uint64_t half : {digest.high, digest.low}) {
    for (int shift = 56; shift >= 0; shift -= 8) bytes += static_cast<char>(half >> shift);
  }
  return bytes;
}

Result<std::string> RandomText() {
  std::string bytes(kRandomBytes, '\0');
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t got = getrandom(bytes.data() + at, bytes.size() - at, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Fail(ErrnoError(errno, "getrandom"));
    at += static_cast<size_t>(got);
  }
  return bytes;
}

class GreetingTime {
 public:
  explicit GreetingTime(PeerLink& link, std::chrono::milliseconds time = kGreetingTime)
      : link_(link) {
    link_.EndBy(std::chrono::steady_clock::now() + time);
  }
  ~GreetingTime() { link_.EndBy(std::nullopt); }
  GreetingTime(const GreetingTime&) = delete;
  GreetingTime& operator=(const GreetingTime&) = delete;

 private:
  PeerLink& link_;
};

enum class Side { kConnects, kAnswers };

// The facts of a greeting that both sides know.
struct Greeting {
  std::string connects_random;
  std::string answers_random;
  Digest connects;
  Digest answers;
};

Result<std::string> ProofOf(const PeerIdentity& self, const Greeting& greeting, Side side) {
  const std::string text =
      StrCat("ckptfs peer 1 ", side == Side::kConnects ? "connects" : "answers ",
             greeting.connects_random, greeting.answers_random, BytesOfDigest(greeting.connects),
             BytesOfDigest(greeting.answers), BytesOfDigest(self.store));
  std::string proof(kProofBytes, '\0');
  unsigned length = 0;
  const auto* made =
      HMAC(EVP_sha256(), self.key.bytes.data(), static_cast<int>(self.key.bytes.size()),
           reinterpret_cast<const unsigned char*>(text.data()), text.size(),
           reinterpret_cast<unsigned char*>(proof.data()), &length);
  if (made == nullptr || length != kProofBytes) {
    return Fail(ErrorCode::kUnsupported, "libcrypto does not have HMAC-SHA256 here");
  }
  return proof;
}

bool IsProof(std::string_view given, const std::string& proof) {
  return given.size() == proof.size() &&
         CRYPTO_memcmp(given.data(), proof.data(), proof.size()) == 0;
}

Error Stranger(const PeerLink& link) {
  return {ErrorCode::kPermission, StrCat(link.about(), ": it does not have this store's key")};
}

Result<PeerFrame> ReceiveGreeting(PeerLink& link, PeerWord word, size_t text_bytes) {
  CKPT_ASSIGN_OR_RETURN(PeerFrame frame, link.Receive(kMaxGreetingText, kGreetingTime));
  if (frame.word == PeerWord::kRefused) {
    return Fail(ErrorCode::kPermission, StrCat(link.about(), ": it refuses us"));
  }
  if (frame.word != word || frame.text.size() != text_bytes || frame.payload_bytes != 0) {
    return Refuse(link.about(), ": not a greeting");
  }
  return frame;
}

std::optional<PeerKey> KeyFromHex(std::string_view text) {
  PeerKey key;
  if (text.size() != 2 * key.bytes.size()) return std::nullopt;
  const auto high = DigestFromHex(text.substr(0, text.size() / 2));
  const auto low = DigestFromHex(text.substr(text.size() / 2));
  if (!high || !low) return std::nullopt;
  const std::string bytes = BytesOfDigest(*high) + BytesOfDigest(*low);
  for (size_t i = 0; i < key.bytes.size(); ++i) key.bytes[i] = static_cast<std::byte>(bytes[i]);
  return key;
}

std::string HexOf(std::string_view bytes) {
  constexpr std::string_view kLetters = "0123456789abcdef";
  std::string text;
  for (const char letter : bytes) {
    text += kLetters[static_cast<unsigned char>(letter) >> 4];
    text += kLetters[static_cast<unsigned char>(letter) & 15];
  }
  return text;
}

}  // namespace

Result<PeerKey> StorePeerKey(Storage& storage) {
  auto found = ReadWhole(storage, kPeerKeyName, kRecordMaxBytes);
  if (!found && found.error().code == ErrorCode::kNotFound) {
    CKPT_ASSIGN_OR_RETURN(const std::string random, RandomText());
    const std::string record = SealRecord({{"version", kRecordVersion}, {"key", HexOf(random)}});
    const Status published =
        storage.PublishIfAbsent(kPeerKeyName, std::as_bytes(std::span(record)));
    if (!published && published.error().code != ErrorCode::kExists) {
      return Fail(Error(published.error()));
    }
    found = ReadWhole(storage, kPeerKeyName, kRecordMaxBytes);
  }
  if (!found) return Fail(std::move(found).error());
  CKPT_ASSIGN_OR_RETURN(const EntryStat stat, StatFile(storage, kPeerKeyName));
  if (storage.local() && (stat.access.mode & 077) != 0) {
    return Fail(ErrorCode::kPermission, StrCat(storage.PathOf(kPeerKeyName),
                                               ": others than its owner may use it; chmod 600"));
  }
  const auto object = UnsealRecord(*found);
  const auto text = object ? TextOf(*object, "key") : std::nullopt;
  const auto key = KeyFromHex(text.value_or(""));
  if (key) return *key;
  return Fail(ErrorCode::kDataLoss, StrCat(storage.PathOf(kPeerKeyName), ": is not a key"));
}

Result<Digest> GreetPeer(PeerLink& link, const PeerIdentity& self) {
  const GreetingTime time(link);
  Greeting greeting;
  CKPT_ASSIGN_OR_RETURN(greeting.connects_random, RandomText());
  greeting.connects = self.node;
  PeerFrame hello{.word = PeerWord::kHello, .digest = self.node};
  hello.text = greeting.connects_random + BytesOfDigest(self.store);
  CKPT_RETURN_IF_ERROR(link.Send(std::move(hello), {}));
  CKPT_ASSIGN_OR_RETURN(const PeerFrame challenge,
                        ReceiveGreeting(link, PeerWord::kChallenge, kRandomBytes + kProofBytes));
  greeting.answers = challenge.digest;
  greeting.answers_random = challenge.text.substr(0, kRandomBytes);
  CKPT_ASSIGN_OR_RETURN(const std::string theirs, ProofOf(self, greeting, Side::kAnswers));
  if (!IsProof(std::string_view(challenge.text).substr(kRandomBytes), theirs)) {
    return Fail(Stranger(link));
  }
  PeerFrame proof{.word = PeerWord::kProof};
  CKPT_ASSIGN_OR_RETURN(proof.text, ProofOf(self, greeting, Side::kConnects));
  CKPT_RETURN_IF_ERROR(link.Send(std::move(proof), {}));
  CKPT_RETURN_IF_ERROR(ReceiveGreeting(link, PeerWord::kWelcome, 0));
  return greeting.answers;
}

Result<Digest> AnswerPeer(PeerLink& link, const PeerIdentity& self,
                          std::chrono::milliseconds time) {
  const GreetingTime bound(link, time);
  CKPT_ASSIGN_OR_RETURN(const PeerFrame hello,
                        ReceiveGreeting(link, PeerWord::kHello, kRandomBytes + kDigestBytes));
  if (hello.text.substr(kRandomBytes) != BytesOfDigest(self.store)) {
    (void)link.Send({.word = PeerWord::kRefused}, {});
    return Fail(ErrorCode::kPermission, StrCat(link.about(), ": it is of another store"));
  }
  Greeting greeting;
  greeting.connects = hello.digest;
  greeting.connects_random = hello.text.substr(0, kRandomBytes);
  greeting.answers = self.node;
  CKPT_ASSIGN_OR_RETURN(greeting.answers_random, RandomText());
  PeerFrame challenge{.word = PeerWord::kChallenge, .digest = self.node};
  CKPT_ASSIGN_OR_RETURN(const std::string mine, ProofOf(self, greeting, Side::kAnswers));
  challenge.text = greeting.answers_random + mine;
  CKPT_RETURN_IF_ERROR(link.Send(std::move(challenge), {}));
  CKPT_ASSIGN_OR_RETURN(const PeerFrame proof,
                        ReceiveGreeting(link, PeerWord::kProof, kProofBytes));
  CKPT_ASSIGN_OR_RETURN(const std::string theirs, ProofOf(self, greeting, Side::kConnects));
  if (!IsProof(proof.text, theirs)) {
    (void)link.Send({.word = PeerWord::kRefused}, {});
    return Fail(Stranger(link));
  }
  CKPT_RETURN_IF_ERROR(link.Send({.word = PeerWord::kWelcome}, {}));
  return greeting.connects;
}

}  // namespace ckptfs
