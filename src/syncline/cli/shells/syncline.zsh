#compdef syncline
# What zsh completes after `syncline`. Made by `syncline completion zsh`, after compinit:
#     source <(syncline completion zsh)

_syncline_words() {
    case "$1" in
@TABLE@
    *) return 1 ;;
    esac
}

_syncline() {
    local verb="" option="" place="" word current="${words[CURRENT]}" list
    local -a found
    for word in "${(@)words[2,CURRENT-1]}"; do
        if [[ -n $option ]]; then
            option=""
        elif [[ -z $place && $word == -* ]]; then
            _syncline_words "$verb $word" >/dev/null && option="$word"
        elif [[ -z $place ]] && _syncline_words "${verb:+$verb }$word" >/dev/null; then
            verb="${verb:+$verb }$word"
        else
            _syncline_words "$verb @rest" >/dev/null && place=1
        fi
    done
    if [[ -n $option && $current == *=* ]]; then
        list="$(_syncline_words "$option ${current%%=*}=")"
    elif [[ -n $option ]]; then
        list="$(_syncline_words "$verb $option")"
    elif [[ -n $place ]]; then
        list="@file"
    elif [[ $current == -* ]]; then
        list="$(_syncline_words "$verb -")"
    else
        list="$(_syncline_words "$verb") $(_syncline_words "$verb @")"
    fi
    found=(${=list%%@*})
    if [[ ${found[1]} == *= ]]; then
        compadd -S "" -- $found
    elif (($#found)); then
        compadd -- $found
    fi
    case "$list" in
    *@toml*) _files -g "*.toml" ;;
    *@file*) _files ;;
    esac
}

if [[ ${funcstack[1]} == _syncline ]]; then
    _syncline
else
    compdef _syncline syncline
fi
