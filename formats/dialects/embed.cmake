# cmake -DOUTPUT=FILE -DTABLE=hf5.toml -DNAME=Hf5 -P embed.cmake: the text as a C++ source.
get_filename_component(table ${TABLE} NAME)
file(READ ${TABLE} text)
file(WRITE ${OUTPUT}.new "// Made from formats/dialects/${table}.
#include \"formats/dialects/shipped.h\"

namespace ckptfs {

std::string_view ${NAME}DialectText() {
  static constexpr char text[] = R\"table(${text})table\";
  return {text, sizeof text - 1};
}

}  // namespace ckptfs
")
file(RENAME ${OUTPUT}.new ${OUTPUT})
